#include "torch_objects.h"

#define MAX_DTYPES 16

PyObject *mpicomm_completed_work;

static PyObject *tensor_type, *parameter_type, *strided, *is_contiguous, *is_neg, *data_ptr, *numel;
static PyObject *is_profiling, *active_modes;
static PyObject *n_dtype, *n_layout, *n_is_cpu, *n_tensors, *n_works;
static Dtype dtypes[MAX_DTYPES];
static int num_dtypes;

/* -- tensors ---------------------------------------------------------------------------------------------------- */

static int call_is_true(PyObject *method, PyObject *tensor) {
    PyObject *result = PyObject_CallFunctionObjArgs(method, tensor, NULL);
    CHECK(result != NULL);
    int is_true = result == Py_True;
    Py_DECREF(result);
    return is_true;
}

static int call_number(PyObject *method, PyObject *tensor, uint64_t *number) {
    PyObject *result = PyObject_CallFunctionObjArgs(method, tensor, NULL);
    CHECK(result != NULL);
    *number = PyLong_AsUnsignedLongLong(result);
    Py_DECREF(result);
    return PyErr_Occurred() ? -1 : 1;
}

/* Whether an attribute is this object. */
static int has(PyObject *object, PyObject *name, PyObject *value) {
    PyObject *found = PyObject_GetAttr(object, name);
    CHECK(found != NULL);
    Py_DECREF(found);
    return found == value;
}

static int find_dtype(PyObject *tensor, const Dtype **dtype) {
    PyObject *found = PyObject_GetAttr(tensor, n_dtype);
    CHECK(found != NULL);
    Py_DECREF(found); /* torch keeps it */
    for (int i = 0; i < num_dtypes; i++)
        if (dtypes[i].dtype == found) {
            *dtype = &dtypes[i];
            return 1;
        }
    return 0;
}

int mpicomm_read_tensor(PyObject *tensor, Memory *memory) {
    uint64_t address;
    PyObject *type = (PyObject *)Py_TYPE(tensor); /* other subclasses may redefine attributes */
    REQUIRE(type == tensor_type || type == parameter_type);
    REQUIRE(find_dtype(tensor, &memory->dtype));
    REQUIRE(has(tensor, n_layout, strided));
    REQUIRE(has(tensor, n_is_cpu, Py_True));
    REQUIRE(call_is_true(is_contiguous, tensor));
    int is_negated = call_is_true(is_neg, tensor);
    REQUIRE(is_negated < 0 ? -1 : !is_negated);
    int has_address = call_number(data_ptr, tensor, &address);
    if (has_address < 0 && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear(); /* a tensor without storage, in a transform of functorch */
        return 0;
    }
    REQUIRE(has_address);
    REQUIRE(call_number(numel, tensor, &memory->count));
    memory->address = (char *)(uintptr_t)address; /* NULL: no elements */
    memory->nbytes = memory->count * memory->dtype->item;
    return address != 0;
}

PyObject *mpicomm_single(PyObject *list) {
    return PyList_CheckExact(list) && PyList_Size(list) == 1 ? PyList_GetItem(list, 0) : NULL;
}

PyObject *mpicomm_list(PyObject *tensor) {
    PyObject *list = PyList_New(1);
    if (list != NULL)
        PyList_SetItem(list, 0, mpicomm_reference(tensor));
    return list;
}

int mpicomm_needs_general_path(void) {
    int is_profiled = mpicomm_returns_true(is_profiling);
    return is_profiled != 0 ? is_profiled : mpicomm_returns_true(active_modes);
}

/* -- works ------------------------------------------------------------------------------------------------------ */

PyObject *mpicomm_work(PyObject *type, PyObject *tensors) {
    PyObject *work = PyObject_CallNoArgs(type);
    if (work != NULL && PyObject_SetAttr(work, n_tensors, tensors) < 0)
        Py_CLEAR(work);
    return work;
}

int mpicomm_add_to_batch(PyObject *batch, PyObject *work) {
    PyObject *works = PyObject_GetAttr(batch, n_works);
    CHECK(works != NULL);
    int result = works == Py_None ? 0 : PyList_Append(works, work);
    Py_DECREF(works);
    return result;
}

/* -- configuration ---------------------------------------------------------------------------------------------- */

static int take_dtype(PyObject *row, Dtype *dtype) {
    PyObject *object;
    unsigned long long item, code;
    long long arithmetic, carrier;
    int sum_row, average_row;
    CHECK(PyArg_ParseTuple(row, "OiiKKiiLL", &object, &dtype->kind, &dtype->compared_kind, &item, &code, &sum_row,
                           &average_row, &arithmetic, &carrier));
    dtype->dtype = mpicomm_reference(object);
    dtype->item = item, dtype->code = code, dtype->sum = (Row)sum_row, dtype->average = (Row)average_row;
    dtype->arithmetic = (Handle)arithmetic, dtype->carrier = (Handle)carrier;
    return 0;
}

static int take_dtypes(PyObject *rows) {
    Py_ssize_t number = PySequence_Size(rows);
    CHECK(number >= 0);
    for (num_dtypes = 0; num_dtypes < number && num_dtypes < MAX_DTYPES; num_dtypes++) {
        PyObject *row = PySequence_GetItem(rows, num_dtypes);
        CHECK(row != NULL);
        int result = take_dtype(row, &dtypes[num_dtypes]);
        Py_DECREF(row);
        CHECK(result == 0);
    }
    return 0;
}

int mpicomm_configure_torch(PyObject *objects, PyObject *rows) {
    static const Named taken[] = {
        {&tensor_type, "tensor"},       {&parameter_type, "parameter"},   {&strided, "strided"},
        {&is_contiguous, "is_contiguous"}, {&is_neg, "is_neg"},           {&data_ptr, "data_ptr"},
        {&numel, "numel"},              {&is_profiling, "is_profiling"},  {&active_modes, "active_modes"},
        {&mpicomm_completed_work, "completed_work"},
    };
    static const Named names[] = {
        {&n_dtype, "dtype"}, {&n_layout, "layout"}, {&n_is_cpu, "is_cpu"}, {&n_tensors, "tensors"}, {&n_works, "works"},
    };
    CHECK(TAKE_ALL(objects, taken) == 0 && STORE_NAMES(names) == 0);
    return take_dtypes(rows);
}
