/* Lets calls of Python's C API fail, one after the other: compile the extension module with `-include` of this file.

   mpicomm_arm(n) lets the n-th call on this thread fail with a MemoryError, and returns how many were left before; 0
   disarms. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <string.h>

#define SHARED __attribute__((weak, visibility("default")))

SHARED _Thread_local int mpicomm_left;

SHARED int mpicomm_arm(int number) {
    int left = mpicomm_left;
    mpicomm_left = number;
    return left;
}

/* Whether the next call must fail. The error names its place. The release of a lock that is held cannot fail. */
static inline int mpicomm_fails(const char *function, int line) {
    if (strcmp(function, "end_turn") == 0 || mpicomm_left == 0 || --mpicomm_left > 0)
        return 0;
#ifdef TRACE
    fprintf(stderr, "FAIL %s %d\n", function, line);
#endif
    PyErr_Format(PyExc_MemoryError, "injected in %s, line %d", function, line);
    return 1;
}

#define OR_NULL(CALL) (mpicomm_fails(__func__, __LINE__) ? NULL : CALL)
#define OR_MINUS_ONE(CALL) (mpicomm_fails(__func__, __LINE__) ? -1 : CALL)

#define PyObject_CallFunctionObjArgs(...) OR_NULL(PyObject_CallFunctionObjArgs(__VA_ARGS__))
#define PyObject_CallNoArgs(...) OR_NULL(PyObject_CallNoArgs(__VA_ARGS__))
#undef PyObject_CallFunction
#define PyObject_CallFunction(...) OR_NULL(_PyObject_CallFunction_SizeT(__VA_ARGS__))
#define PyObject_GetAttr(...) OR_NULL(PyObject_GetAttr(__VA_ARGS__))
#define PyObject_GetItem(...) OR_NULL(PyObject_GetItem(__VA_ARGS__))
#define PyList_New(...) OR_NULL(PyList_New(__VA_ARGS__))
#define PyList_GetSlice(...) OR_NULL(PyList_GetSlice(__VA_ARGS__))
#define PyTuple_New(...) OR_NULL(PyTuple_New(__VA_ARGS__))
#define PyTuple_Pack(...) OR_NULL(PyTuple_Pack(__VA_ARGS__))
#define PyLong_FromLong(...) OR_NULL(PyLong_FromLong(__VA_ARGS__))
#define PyLong_FromLongLong(...) OR_NULL(PyLong_FromLongLong(__VA_ARGS__))
#define PyLong_FromUnsignedLongLong(...) OR_NULL(PyLong_FromUnsignedLongLong(__VA_ARGS__))
#define PyFloat_FromDouble(...) OR_NULL(PyFloat_FromDouble(__VA_ARGS__))
#define PyIter_Next(...) OR_NULL(PyIter_Next(__VA_ARGS__))
#undef PyObject_New
#define PyObject_New(TYPE, OBJECT) OR_NULL((TYPE *)_PyObject_New(OBJECT))
#define PyObject_SetAttr(...) OR_MINUS_ONE(PyObject_SetAttr(__VA_ARGS__))
#define PyDict_SetItem(...) OR_MINUS_ONE(PyDict_SetItem(__VA_ARGS__))
#define PySet_Add(...) OR_MINUS_ONE(PySet_Add(__VA_ARGS__))
#define PyList_Append(...) OR_MINUS_ONE(PyList_Append(__VA_ARGS__))
#define PyObject_IsTrue(...) OR_MINUS_ONE(PyObject_IsTrue(__VA_ARGS__))
#define PyObject_Size(...) OR_MINUS_ONE(PyObject_Size(__VA_ARGS__))
#define PyObject_RichCompareBool(...) OR_MINUS_ONE(PyObject_RichCompareBool(__VA_ARGS__))
