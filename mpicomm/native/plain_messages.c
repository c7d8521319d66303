/* Send and receive of a group on plain tensors: from the arguments of torch's method to its work, and to its end.

   A call that does not qualify returns None without side effects, and the caller takes the general path. The transfer of
   a message is the object that the work waits for; message_work.Transfer is that of the general path. */

#include "extension.h"
#include "mpi_functions.h"
#include "records.h"
#include "slots.h"
#include "torch_objects.h"

#include <limits.h>
#include <pthread.h>

#define STATUS_WORDS 8 /* of 64 bits: an MPI_Status takes at most 24 bytes in Open MPI and MPICH */

/* -- types ------------------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    PyObject *messages, *group, *state, *message_numbers, *in_flight, *unposted, *batch, *reap, *wake, *error_of;
    int size, has_threads;
    long long largest_tag;
    unsigned long long buffered_bytes; /* MPI may copy messages of this size, and completes them at once */
    Py_ssize_t reap_above;
    Handle comm;
} PlainMessages;

typedef struct {
    PyObject_HEAD
    PlainMessages *owner;
    PyObject *operation, *tensor, *error;
    PyThread_type_lock lock; /* MPI forbids two threads to complete one request */
    Handle request, datatype;
    uint64_t count;
    char is_send, is_done;
} Transfer;

/* A direction of messages. */
typedef struct {
    int kind; /* for the cache of call sites */
    int is_send;
    PyObject *name;
} Direction;

static Direction sending = {BARRIER + 1, 1, NULL}, receiving = {BARRIER + 2, 0, NULL};
static allocfunc allocate;
static PyObject *transfer_type, *message_work, *refuse_children;
static PyObject *n_poller, *n_is_idle, *n_transfer, *n_messages;

static int is_child; /* a process that the rank has forked */

static void mark_child(void) { is_child = 1; }

/* -- a transfer -------------------------------------------------------------------------------------------------- */

/* Return the error of a message that MPI has completed, or NULL. */
static PyObject *find_error(const Transfer *self, int code, const uint64_t *status) {
    int count = 0;
    if (code == 0 && !self->is_send)
        code = mpicomm_mpi.get_elements(status, self->datatype, &count);
    if (code == 0 && (self->is_send || (uint64_t)count == self->count))
        return NULL;
    PyObject *cause = code != 0 ? mpicomm_mpi_error(code) : mpicomm_reference(Py_None), *error = NULL;
    if (cause != NULL)
        error = PyObject_CallFunction(self->owner->error_of, "OOi", (PyObject *)self, cause, count);
    Py_XDECREF(cause);
    if (error == NULL && PyErr_ExceptionMatches(PyExc_Exception)) { /* wait() raises this one */
        PyObject *type, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        Py_XDECREF(type);
        Py_XDECREF(traceback);
    }
    return error;
}

/* After MPI has completed the message; the caller holds the lock. -1 with the exception of a signal handler. */
static int end(Transfer *self, int code, const uint64_t *status) {
    PyObject *type, *exception, *traceback;
    self->error = find_error(self, code, status);
    PyErr_Fetch(&type, &exception, &traceback);
    if (exception != NULL || type != NULL)
        self->error = PyObject_CallFunction(PyExc_RuntimeError, "s", "a message failed, and an interrupt hid its error.\n"
                                                                     "Check that both ranks pass the same size.");
    self->is_done = 1;
    int result = PySet_Discard(self->owner->in_flight, (PyObject *)self) < 0 ? -1 : 0;
    if (result == 0)
        result = mpicomm_end_record((CallRecord *)self->operation);
    if (type == NULL)
        return result;
    PyErr_Restore(type, exception, traceback);
    return -1;
}

/* Take the lock; meanwhile other threads and signal handlers run. */
static int take_lock(Transfer *self) {
    PyLockStatus status = PyThread_acquire_lock_timed(self->lock, 0, 0);
    while (status != PY_LOCK_ACQUIRED) {
        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(self->lock, -1, 1);
        Py_END_ALLOW_THREADS
        if (status == PY_LOCK_INTR)
            CHECK(PyErr_CheckSignals() == 0);
    }
    return 0;
}

/* Wait for the message. */
static int wait_for(Transfer *self) {
    uint64_t status[STATUS_WORDS];
    int code, result = 0;
    CHECK(take_lock(self) == 0);
    if (!self->is_done) {
        Py_BEGIN_ALLOW_THREADS
        code = mpicomm_mpi.wait(&self->request, status);
        Py_END_ALLOW_THREADS
        result = end(self, code, status);
    }
    PyThread_release_lock(self->lock);
    return result;
}

static PyObject *transfer_wait(PyObject *object, PyObject *none) {
    (void)none;
    return wait_for((Transfer *)object) < 0 ? NULL : mpicomm_reference(Py_None);
}

static PyObject *transfer_wait_simply(PyObject *object, PyObject *none) {
    Transfer *self = (Transfer *)object;
    (void)none;
    if (!self->is_done) {
        Py_ssize_t unposted = PyObject_Size(self->owner->unposted);
        if (unposted < 0)
            return NULL;
        if (unposted > 0 || is_child)
            Py_RETURN_FALSE;
        if (mpicomm_begin_wait((CallRecord *)self->operation) < 0 || wait_for(self) < 0)
            return NULL;
    }
    return PyBool_FromLong(self->error == NULL);
}

/* Test the message, unless another thread waits for it; the caller's process is the rank. */
static int test(Transfer *self) {
    uint64_t status[STATUS_WORDS];
    int code, flag = 0, result = 0;
    if (self->is_done || !PyThread_acquire_lock(self->lock, NOWAIT_LOCK))
        return 0;
    if (!self->is_done) {
        Py_BEGIN_ALLOW_THREADS
        code = mpicomm_mpi.test(&self->request, &flag, status);
        Py_END_ALLOW_THREADS
        if (code != 0 || flag)
            result = end(self, code, status);
    }
    PyThread_release_lock(self->lock);
    return result;
}

static PyObject *transfer_test(PyObject *object, PyObject *none) {
    Transfer *self = (Transfer *)object;
    (void)none;
    if (!self->is_done && is_child && mpicomm_drop(PyObject_CallNoArgs(refuse_children)) < 0)
        return NULL;
    return test(self) < 0 ? NULL : PyBool_FromLong(self->is_done);
}

static PyObject *transfer_give_up(PyObject *object, PyObject *error) {
    Transfer *self = (Transfer *)object;
    if (PyThread_acquire_lock(self->lock, NOWAIT_LOCK)) {
        if (!self->is_done) {
            self->error = mpicomm_reference(error);
            self->is_done = 1;
        }
        PyThread_release_lock(self->lock);
    }
    Py_RETURN_NONE;
}

static PyObject *transfer_source(PyObject *object, void *none) {
    Transfer *self = (Transfer *)object;
    (void)none;
    return mpicomm_reference(((CallRecord *)self->operation)->peer);
}

/* While the message is in flight, MPI accesses the tensor: the garbage collector does not see the references. */
static int traverse_transfer(PyObject *object, visitproc visit, void *arg) {
    Transfer *self = (Transfer *)object;
    Py_VISIT(Py_TYPE(object));
    if (self->is_done) {
        Py_VISIT(self->owner);
        Py_VISIT(self->operation);
        Py_VISIT(self->tensor);
        Py_VISIT(self->error);
    }
    return 0;
}

static int clear_transfer(PyObject *object) {
    Py_CLEAR(((Transfer *)object)->error); /* its traceback has the frames of the program */
    return 0;
}

static void free_transfer(PyObject *object) {
    Transfer *self = (Transfer *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_CLEAR(self->owner);
    Py_CLEAR(self->operation);
    Py_CLEAR(self->tensor);
    Py_CLEAR(self->error);
    if (self->lock != NULL)
        PyThread_free_lock(self->lock);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef transfer_methods[] = {
    {"wait", transfer_wait, METH_NOARGS, "Wait until the message has completed; other threads run meanwhile."},
    {"wait_simply", transfer_wait_simply, METH_NOARGS,
     "Wait as a program does, and return whether the message has completed without an error; False also if the wait\n"
     "needs more than MPI."},
    {"test", transfer_test, METH_NOARGS, "Return whether the message has completed; each call progresses it."},
    {"give_up", transfer_give_up, METH_O, "Complete with an error, unless a thread is in MPI with the message."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef transfer_members[] = {
    {"operation", T_OBJECT, offsetof(Transfer, operation), READONLY, "The record."},
    {"tensor", T_OBJECT, offsetof(Transfer, tensor), READONLY, "The tensor that is sent or received."},
    {"error", T_OBJECT, offsetof(Transfer, error), READONLY, "The error of the message, or None."},
    {"is_done", T_BOOL, offsetof(Transfer, is_done), READONLY, "Whether it has completed or failed."},
    {"is_send", T_BOOL, offsetof(Transfer, is_send), READONLY, "Whether this rank sends it."},
    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef transfer_properties[] = {
    {"source", transfer_source, NULL, "The group rank of the sender of a received message.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot transfer_slots[] = {
    {Py_tp_doc, "The transfer of one message, with the methods of message_work.Transfer."},
    {Py_tp_methods, transfer_methods},
    {Py_tp_members, transfer_members},
    {Py_tp_getset, transfer_properties},
    {Py_tp_traverse, traverse_transfer},
    {Py_tp_clear, clear_transfer},
    {Py_tp_dealloc, free_transfer},
    {0, NULL},
};
static PyType_Spec transfer_spec = {"mpicomm.native.hot_path.Transfer", sizeof(Transfer), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                    transfer_slots};

/* -- send and receive -------------------------------------------------------------------------------------------- */

/* Read an exact int from 0 to `last`: 1, or 0 for another value. */
static int read_number(PyObject *object, long long last, int *number) {
    if (!PyLong_CheckExact(object))
        return 0;
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    *number = (int)value;
    return !overflow && value >= 0 && value <= last;
}

/* Whether MPI may have the message now: the group is usable, and no earlier message waits for a device. */
static int is_ready(const PlainMessages *self) {
    Py_ssize_t unposted = PyObject_Size(self->unposted);
    CHECK(unposted >= 0);
    return unposted > 0 ? 0 : mpicomm_is_usable((GroupRecord *)self->group, self->state);
}

static Transfer *create_transfer(PlainMessages *self, const Direction *direction, const Memory *memory,
                                 PyObject *tensor, PyObject *peer, PyObject *tag) {
    Transfer *transfer = (Transfer *)allocate((PyTypeObject *)transfer_type, 0);
    if (transfer == NULL)
        return NULL;
    transfer->owner = (PlainMessages *)mpicomm_reference((PyObject *)self);
    transfer->tensor = mpicomm_reference(tensor), transfer->is_send = (char)direction->is_send;
    transfer->datatype = memory->dtype->carrier, transfer->count = memory->count;
    transfer->lock = PyThread_allocate_lock();
    if (transfer->lock == NULL)
        PyErr_NoMemory();
    else
        transfer->operation = (PyObject *)mpicomm_record_message(
            (GroupRecord *)self->group, direction->kind, direction->name, memory->dtype->dtype, memory->count, peer,
            tag, self->message_numbers);
    if (transfer->operation == NULL)
        Py_CLEAR(transfer);
    return transfer;
}

/* Pass the message to MPI. */
static int post(PlainMessages *self, Transfer *transfer, const Memory *memory, int peer, int tag) {
    int code;
    Py_BEGIN_ALLOW_THREADS
    if (transfer->is_send)
        code = mpicomm_mpi.isend(memory->address, (intptr_t)memory->count, transfer->datatype, peer, tag, self->comm,
                                 &transfer->request);
    else
        code = mpicomm_mpi.irecv(memory->address, (intptr_t)memory->count, transfer->datatype, peer, tag, self->comm,
                                 &transfer->request);
    Py_END_ALLOW_THREADS
    return code == 0 ? 0 : mpicomm_raise_mpi(code);
}

/* Whether no thread makes the messages of the group progress. */
static int needs_poller(const PlainMessages *self) {
    PyObject *poller = PyObject_GetAttr(self->messages, n_poller);
    CHECK(poller != NULL);
    int is_idle = poller == Py_None ? 1 : mpicomm_is_true(poller, n_is_idle);
    Py_DECREF(poller);
    return is_idle;
}

/* Keep a message and its memory alive until it completes, and let it progress. */
static int track(PlainMessages *self, Transfer *transfer) {
    CHECK(PySet_Add(self->in_flight, (PyObject *)transfer) == 0); /* first: a signal handler may raise an exception */
    if (PySet_Size(self->in_flight) > self->reap_above)
        CHECK(mpicomm_drop(PyObject_CallNoArgs(self->reap)) == 0);
    if (!self->has_threads)
        return test(transfer);
    int is_idle = needs_poller(self);
    CHECK(is_idle >= 0);
    return is_idle ? mpicomm_drop(PyObject_CallFunctionObjArgs(self->wake, (PyObject *)transfer, NULL)) : 0;
}

static PyObject *work_of(const PlainMessages *self, Transfer *transfer, PyObject *tensors) {
    PyObject *work = mpicomm_work(message_work, tensors);
    if (work != NULL && (PyObject_SetAttr(work, n_transfer, (PyObject *)transfer) < 0 ||
                         PyObject_SetAttr(work, n_messages, self->messages) < 0 ||
                         mpicomm_add_to_batch(self->batch, work) < 0))
        Py_CLEAR(work);
    return work;
}

/* Start a message that qualifies; return its work. */
static PyObject *start(PlainMessages *self, const Direction *direction, PyObject *tensor, const Memory *memory,
                       PyObject *peer, PyObject *tag, int to, int with_tag) {
    PyObject *work = NULL, *tensors = mpicomm_list(tensor);
    Transfer *transfer = tensors != NULL ? create_transfer(self, direction, memory, tensor, peer, tag) : NULL;
    if (transfer == NULL) {
        Py_XDECREF(tensors);
        return NULL;
    }
    if (post(self, transfer, memory, to, with_tag) == 0) {
        int is_short = transfer->is_send && memory->nbytes <= self->buffered_bytes;
        int result = is_short ? test(transfer) : 0;
        if (result == 0 && transfer->is_done && transfer->error == NULL)
            work = mpicomm_work(mpicomm_completed_work, tensors);
        else if (result == 0 && (transfer->is_done || track(self, transfer) == 0))
            work = work_of(self, transfer, tensors);
    }
    Py_DECREF((PyObject *)transfer);
    Py_DECREF(tensors);
    return work;
}

static PyObject *submit(PlainMessages *self, const Direction *direction, PyObject *const *args, Py_ssize_t number) {
    static PyObject *zero;
    Memory memory;
    int peer, tag = 0, result;
    if (zero == NULL && (zero = PyLong_FromLong(0)) == NULL)
        return NULL;
    PyObject *tensor = number == 2 || number == 3 ? mpicomm_single(args[0]) : NULL;
    PyObject *tag_object = number == 3 ? args[2] : zero;
    if (tensor == NULL || !read_number(args[1], self->size - 1, &peer) ||
        !read_number(tag_object, self->largest_tag, &tag))
        Py_RETURN_NONE;
    PyObject *work = NULL;
    mpicomm_reference(tensor); /* the checks may run code in Python, which may change the list */
    result = mpicomm_needs_general_path();
    if (result == 0) {
        result = is_ready(self);
        result = result > 0 ? mpicomm_read_tensor(tensor, &memory) : result;
    } else if (result > 0) {
        result = 0;
    }
    if (result > 0 && memory.count <= INT_MAX)
        work = start(self, direction, tensor, &memory, args[1], tag_object, peer, tag);
    else if (result >= 0)
        work = mpicomm_reference(Py_None);
    Py_DECREF(tensor);
    return work;
}

static PyObject *send(PyObject *self, PyObject *const *args, Py_ssize_t number) {
    return submit((PlainMessages *)self, &sending, args, number);
}

static PyObject *receive(PyObject *self, PyObject *const *args, Py_ssize_t number) {
    return submit((PlainMessages *)self, &receiving, args, number);
}

/* -- the type of a group's messages ------------------------------------------------------------------------------ */

#define NUM_MEMBERS 10
#define MEMBERS(SELF) (&((PlainMessages *)(SELF))->messages)

static PyObject *create(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static const char *const names[NUM_MEMBERS] = {"messages", "group", "state", "message_numbers", "in_flight",
                                                   "unposted", "batch", "reap",  "wake",            "error_of"};
    PyObject *objects;
    long long comm;
    (void)keywords;
    PlainMessages *self = (PlainMessages *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    int is_taken = PyArg_ParseTuple(args, "O!iLKnLp", &PyDict_Type, &objects, &self->size, &self->largest_tag,
                                    &self->buffered_bytes, &self->reap_above, &comm, &self->has_threads);
    for (int i = 0; i < NUM_MEMBERS && is_taken; i++)
        is_taken = mpicomm_take(objects, names[i], MEMBERS(self) + i) == 0;
    if (!is_taken) {
        Py_DECREF(self);
        return NULL;
    }
    self->comm = (Handle)comm;
    return (PyObject *)self;
}

static int traverse(PyObject *self, visitproc visit, void *arg) {
    return mpicomm_traverse(self, MEMBERS(self), NUM_MEMBERS, visit, arg);
}

static int clear(PyObject *self) { return mpicomm_clear(MEMBERS(self), NUM_MEMBERS); }

static void free_messages(PyObject *self) {
    PyObject_GC_UnTrack(self);
    mpicomm_free(self, MEMBERS(self), NUM_MEMBERS);
}

static PyMethodDef messages_methods[] = {
    {"send", (PyCFunction)(void (*)(void))send, METH_FASTCALL, "Start sending a tensor."},
    {"recv", (PyCFunction)(void (*)(void))receive, METH_FASTCALL, "Start receiving a tensor."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot messages_slots[] = {
    {Py_tp_doc, "The messages of one group on plain tensors.\n\n"
                "The methods take the arguments of the methods of torch's process groups, and return the work; or None,\n"
                "without side effects, if the call needs the general path."},
    {Py_tp_new, create},       {Py_tp_methods, messages_methods}, {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},      {Py_tp_dealloc, free_messages},    {0, NULL},
};
static PyType_Spec messages_spec = {"mpicomm.native.hot_path.PlainMessages", sizeof(PlainMessages), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, messages_slots};

int mpicomm_add_plain_messages(PyObject *module) {
    PyObject *type = PyType_FromSpec(&messages_spec);
    CHECK(type != NULL && (transfer_type = PyType_FromSpec(&transfer_spec)) != NULL);
    allocate = (allocfunc)PyType_GetSlot((PyTypeObject *)transfer_type, Py_tp_alloc);
    if (pthread_atfork(NULL, NULL, mark_child) != 0) {
        PyErr_NoMemory();
        return -1;
    }
    CHECK(PyModule_AddObjectRef(module, "PlainMessages", type) == 0);
    Py_DECREF(type);
    return 0;
}

int mpicomm_configure_messages(PyObject *objects) {
    static const Named taken[] = {{&message_work, "message_work"}, {&refuse_children, "refuse_children"}};
    static const Named names[] = {
        {&n_poller, "poller"},     {&n_is_idle, "is_idle"}, {&n_transfer, "_transfer"}, {&n_messages, "_messages"},
        {&sending.name, "send"},   {&receiving.name, "recv"},
    };
    CHECK(TAKE_ALL(objects, taken) == 0);
    return STORE_NAMES(names);
}
