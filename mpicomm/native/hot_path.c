/* The module mpicomm.native.hot_path. */

#include "extension.h"
#include "mpi_functions.h"
#include "plain_calls.h"
#include "plain_messages.h"
#include "records.h"
#include "torch_objects.h"

int mpicomm_take(PyObject *objects, const char *name, PyObject **place) {
    PyObject *object = PyDict_GetItemString(objects, name);
    if (object == NULL) {
        PyErr_Format(PyExc_KeyError, "%s", name);
        return -1;
    }
    mpicomm_replace(place, mpicomm_reference(object));
    return 0;
}

int mpicomm_take_all(PyObject *objects, const Named *table, size_t number) {
    for (size_t i = 0; i < number; i++)
        CHECK(mpicomm_take(objects, table[i].name, table[i].place) == 0);
    return 0;
}

int mpicomm_store_names(const Named *table, size_t number) {
    for (size_t i = 0; i < number; i++)
        CHECK((*table[i].place = PyUnicode_InternFromString(table[i].name)) != NULL);
    return 0;
}

int mpicomm_traverse(PyObject *self, PyObject **members, int number, visitproc visit, void *arg) {
    for (int i = 0; i < number; i++)
        Py_VISIT(members[i]);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

int mpicomm_clear(PyObject **members, int number) {
    for (int i = 0; i < number; i++)
        Py_CLEAR(members[i]);
    return 0;
}

void mpicomm_free(PyObject *self, PyObject **members, int number) {
    PyTypeObject *type = Py_TYPE(self);
    mpicomm_clear(members, number);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int consume_truth(PyObject *object) {
    CHECK(object != NULL);
    int is_true = PyObject_IsTrue(object);
    Py_DECREF(object);
    return is_true;
}

int mpicomm_is_true(PyObject *object, PyObject *name) { return consume_truth(PyObject_GetAttr(object, name)); }

int mpicomm_returns_true(PyObject *function) { return consume_truth(PyObject_CallNoArgs(function)); }

static PyObject *configure(PyObject *module, PyObject *args) {
    PyObject *objects, *rows, *options, *exception;
    const char *mpi;
    long long sum, in_place;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!OO!sOLL", &PyDict_Type, &objects, &rows, &PyDict_Type, &options, &mpi, &exception,
                          &sum, &in_place) ||
        mpicomm_configure_mpi(mpi, exception) < 0 || mpicomm_configure_torch(objects, rows) < 0 ||
        mpicomm_configure_calls(objects, options, sum, in_place) < 0 || mpicomm_configure_messages(objects) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *configure_recorder(PyObject *module, PyObject *objects) {
    (void)module;
    if (!PyDict_Check(objects)) {
        PyErr_SetString(PyExc_TypeError, "expected a dict");
        return NULL;
    }
    if (mpicomm_configure_recorder(objects) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"configure", configure, METH_VARARGS, "Take the objects that plain calls need; before the first of them."},
    {"configure_recorder", configure_recorder, METH_O, "Take the objects of flight_recorder."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
    CHECK(mpicomm_add_record_types(module) == 0);
    CHECK(mpicomm_add_plain_calls(module) == 0);
    return mpicomm_add_plain_messages(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "mpicomm.native.hot_path", "Operations on plain tensors, without Python code.", 0,
    functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_hot_path(void) { return PyModuleDef_Init(&definition); }
