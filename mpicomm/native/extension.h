/* The extension module of the hot path, in the limited API of Python 3.10: one binary for all later versions.

   It knows torch and mpi4py only through the attributes of Python objects. */

#ifndef MPICOMM_EXTENSION_H
#define MPICOMM_EXTENSION_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <structmember.h>

/* Set an exception if a name is missing: what an object of Python must have. */
#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return -1;                                                                                                 \
    } while (0)

/* Return a new reference to an object. */
static inline PyObject *mpicomm_reference(PyObject *object) {
    Py_INCREF(object);
    return object;
}

/* Replace a reference by a new one. */
static inline void mpicomm_replace(PyObject **place, PyObject *object) {
    PyObject *old = *place;
    *place = object;
    Py_XDECREF(old);
}

/* Drop the result of a call; -1 if it is an exception. */
static inline int mpicomm_drop(PyObject *result) {
    CHECK(result != NULL);
    Py_DECREF(result);
    return 0;
}

/* Take an object of a dict; -1 with an exception if it is not there. */
int mpicomm_take(PyObject *objects, const char *name, PyObject **place);

/* Return an interned string. */
PyObject *mpicomm_name(const char *text);

/* Return whether an attribute is true; -1 with an exception. */
int mpicomm_is_true(PyObject *object, PyObject *name);

/* Return whether a function without arguments returns something true; -1 with an exception. */
int mpicomm_returns_true(PyObject *function);

#endif
