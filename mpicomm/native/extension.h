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

/* A variable for an object, and the object's name. */
typedef struct {
    PyObject **place;
    const char *name;
} Named;

/* Take an object of a dict; -1 with an exception if it is not there. */
int mpicomm_take(PyObject *objects, const char *name, PyObject **place);

/* Do the same for each variable of a table; and store the names themselves, interned. */
#define TAKE_ALL(OBJECTS, TABLE) mpicomm_take_all(OBJECTS, TABLE, sizeof(TABLE) / sizeof *(TABLE))
#define STORE_NAMES(TABLE) mpicomm_store_names(TABLE, sizeof(TABLE) / sizeof *(TABLE))
int mpicomm_take_all(PyObject *objects, const Named *table, size_t number);
int mpicomm_store_names(const Named *table, size_t number);

/* Visit, clear and free the references of an object, which are members in a row, for the slots of its type. */
int mpicomm_traverse(PyObject *self, PyObject **members, int number, visitproc visit, void *arg);
int mpicomm_clear(PyObject **members, int number);
void mpicomm_free(PyObject *self, PyObject **members, int number);

/* Return whether an attribute is true; -1 with an exception. */
int mpicomm_is_true(PyObject *object, PyObject *name);

/* Return whether a function without arguments returns something true; -1 with an exception. */
int mpicomm_returns_true(PyObject *function);

#endif
