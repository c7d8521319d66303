#include "records.h"

#include <time.h>

#define NUM_SITES 4096 /* known call sites; a power of two */
#define NUM_KINDS 16
#define USUAL_DEPTH 3 /* frames: the method of the group, torch's function, its wrapper; then the user's */

/* -- types ------------------------------------------------------------------------------------------------------ */

#define MEMBER(TYPE, NAME) {#NAME, T_OBJECT, offsetof(TYPE, NAME), 0, NULL}

static PyMemberDef call_members[] = {
    MEMBER(CallRecord, code),   MEMBER(CallRecord, instruction), MEMBER(CallRecord, group),
    MEMBER(CallRecord, name),   MEMBER(CallRecord, is_message),  MEMBER(CallRecord, sequence),
    MEMBER(CallRecord, dtype),  MEMBER(CallRecord, count),       MEMBER(CallRecord, peer),
    MEMBER(CallRecord, number), MEMBER(CallRecord, called_at),   MEMBER(CallRecord, start),
    MEMBER(CallRecord, end),    MEMBER(CallRecord, limit_or_options),       MEMBER(CallRecord, tag),
    MEMBER(CallRecord, usual_limit), MEMBER(CallRecord, message), {NULL, 0, 0, 0, NULL},
};

static PyMemberDef group_members[] = {
    MEMBER(GroupRecord, sequence),
    MEMBER(GroupRecord, running),
    MEMBER(GroupRecord, broken),
    MEMBER(GroupRecord, timeout),
    {NULL, 0, 0, 0, NULL},
};

/* The number of the members of a type from `FIRST` on, which are objects. */
#define NUM_FIELDS(TYPE, FIRST) ((int)((sizeof(TYPE) - offsetof(TYPE, FIRST)) / sizeof(PyObject *)))

static void free_call(PyObject *self) {
    mpicomm_free(self, &((CallRecord *)self)->code, NUM_FIELDS(CallRecord, code));
}

static void free_group(PyObject *self) {
    mpicomm_free(self, &((GroupRecord *)self)->sequence, NUM_FIELDS(GroupRecord, sequence));
}

static PyType_Slot call_slots[] = {{Py_tp_members, call_members}, {Py_tp_dealloc, free_call}, {0, NULL}};
static PyType_Slot group_slots[] = {{Py_tp_members, group_members}, {Py_tp_dealloc, free_group}, {0, NULL}};
static PyType_Spec call_spec = {"mpicomm.native.hot_path.CallRecord", sizeof(CallRecord), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, call_slots};
static PyType_Spec group_spec = {"mpicomm.native.hot_path.GroupRecord", sizeof(GroupRecord), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, group_slots};

static PyObject *call_base, *group_base;

int mpicomm_add_record_types(PyObject *module) {
    CHECK((call_base = PyType_FromSpec(&call_spec)) != NULL);
    CHECK((group_base = PyType_FromSpec(&group_spec)) != NULL);
    CHECK(PyModule_AddObjectRef(module, "CallRecord", call_base) == 0);
    CHECK(PyModule_AddObjectRef(module, "GroupRecord", group_base) == 0);
    return 0;
}

/* -- the state of flight_recorder ------------------------------------------------------------------------------- */

static PyObject *operation_type, *get_frame, *find_caller, *note_thread, *numbers, *ring, *latest, *running;
static PyObject *f_code, *f_lasti, *n_is_open, *depths[NUM_KINDS + 1];
static allocfunc allocate;

static struct {
    PyObject *code; /* a reference: another code object cannot have this address */
    long instruction;
    int kind;
} sites[NUM_SITES];

static int depth_of_kind[NUM_KINDS];

int mpicomm_configure_recorder(PyObject *objects) {
    static const Named taken[] = {
        {&operation_type, "operation"}, {&get_frame, "get_frame"}, {&find_caller, "find_caller"},
        {&note_thread, "note_thread"},  {&numbers, "numbers"},     {&ring, "ring"},
        {&latest, "latest"},            {&running, "running"},
    };
    static const Named names[] = {{&f_code, "f_code"}, {&f_lasti, "f_lasti"}, {&n_is_open, "is_open"}};
    CHECK(TAKE_ALL(objects, taken) == 0 && STORE_NAMES(names) == 0);
    if (!PyType_IsSubtype((PyTypeObject *)operation_type, (PyTypeObject *)call_base) || !PyList_Check(ring) ||
        !PyList_Check(latest) || !PyDict_Check(running)) {
        PyErr_SetString(PyExc_TypeError, "expected the objects of flight_recorder");
        return -1;
    }
    allocate = (allocfunc)PyType_GetSlot((PyTypeObject *)operation_type, Py_tp_alloc);
    for (int i = 0; i <= NUM_KINDS && depths[i] == NULL; i++)
        CHECK((depths[i] = PyLong_FromLong(i)) != NULL);
    for (int i = 0; i < NUM_KINDS; i++)
        depth_of_kind[i] = USUAL_DEPTH;
    return 0;
}

/* -- call sites ------------------------------------------------------------------------------------------------- */

static size_t place_of(PyObject *code, long instruction, int kind) {
    return ((uintptr_t)code / 16 + (uintptr_t)instruction / 2 + (uintptr_t)kind * 67) % NUM_SITES;
}

static int is_known(size_t place, PyObject *code, long instruction, int kind) {
    return sites[place].code == code && sites[place].instruction == instruction && sites[place].kind == kind;
}

/* Look for the caller in all frames; remember it if its distance will be the same in its next call. */
static int search_site(CallRecord *record, int kind) {
    PyObject *found = PyObject_CallNoArgs(find_caller), *code, *depth;
    CHECK(found != NULL);
    code = PyTuple_GetItem(found, 0), record->instruction = PyTuple_GetItem(found, 1);
    depth = PyTuple_GetItem(found, 2);
    if (code == NULL || record->instruction == NULL || depth == NULL) {
        record->instruction = NULL;
        Py_DECREF(found);
        return -1;
    }
    record->code = mpicomm_reference(code);
    mpicomm_reference(record->instruction);
    if (depth != Py_None) {
        long frames = PyLong_AsLong(depth), instruction = PyLong_AsLong(record->instruction);
        if (frames >= 0 && frames <= NUM_KINDS && instruction >= 0) {
            size_t place = place_of(code, instruction, kind);
            mpicomm_replace(&sites[place].code, mpicomm_reference(code));
            sites[place].instruction = instruction, sites[place].kind = kind;
            depth_of_kind[kind] = (int)frames;
        }
    }
    Py_DECREF(found);
    return PyErr_Occurred() ? -1 : 0;
}

/* Fill in the call site: the frame at the distance at which the last one was, if its instruction is a known site. */
static int find_site(CallRecord *record, int kind) {
    PyObject *frame = PyObject_CallFunctionObjArgs(get_frame, depths[depth_of_kind[kind]], NULL);
    if (frame == NULL) { /* the stack has fewer frames */
        CHECK(PyErr_ExceptionMatches(PyExc_ValueError));
        PyErr_Clear();
        return search_site(record, kind);
    }
    record->code = PyObject_GetAttr(frame, f_code);
    record->instruction = PyObject_GetAttr(frame, f_lasti);
    Py_DECREF(frame);
    CHECK(record->code != NULL && record->instruction != NULL);
    long instruction = PyLong_AsLong(record->instruction);
    size_t place = place_of(record->code, instruction, kind);
    if (is_known(place, record->code, instruction, kind))
        return 0;
    Py_CLEAR(record->code);
    Py_CLEAR(record->instruction);
    return search_site(record, kind);
}

/* -- groups ----------------------------------------------------------------------------------------------------- */

int mpicomm_is_usable(const GroupRecord *group, PyObject *state) {
    if (group->broken == NULL || !PyUnicode_Check(group->broken) || PyUnicode_GetLength(group->broken) > 0)
        return 0;
    return mpicomm_is_true(state, n_is_open);
}

/* -- records ---------------------------------------------------------------------------------------------------- */

static PyObject *now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time); /* the clock of time.monotonic() */
    return PyFloat_FromDouble((double)time.tv_sec + (double)time.tv_nsec * 1e-9);
}

/* Let flight_recorder know this thread, once. */
static int remember_thread(void) {
    static _Thread_local int is_known;
    if (is_known)
        return 0;
    CHECK(mpicomm_drop(PyObject_CallNoArgs(note_thread)) == 0);
    is_known = 1;
    return 0;
}

/* Number a collective in its group. */
static int take_number(CallRecord *record, GroupRecord *group) {
    long long sequence = PyLong_AsLongLong(group->sequence);
    CHECK(sequence != -1 || !PyErr_Occurred());
    PyObject *next = PyLong_FromLongLong(sequence + 1);
    CHECK(next != NULL);
    mpicomm_replace(&group->sequence, next);
    record->sequence = mpicomm_reference(next);
    return 0;
}

/* Number the record in this process, and store it in the ring. */
static int store(CallRecord *record) {
    CHECK((record->number = PyIter_Next(numbers)) != NULL);
    Py_ssize_t number = PyLong_AsSsize_t(record->number);
    CHECK(PyList_SetItem(ring, number % PyList_Size(ring), mpicomm_reference((PyObject *)record)) == 0);
    return PyList_SetItem(latest, 0, mpicomm_reference((PyObject *)record));
}

/* Create a record of a call with its site, which is not in the ring yet. */
static CallRecord *create(GroupRecord *group, int kind, PyObject *name, PyObject *dtype, uint64_t count,
                          PyObject *peer) {
    if (remember_thread() < 0)
        return NULL;
    CallRecord *record = (CallRecord *)allocate((PyTypeObject *)operation_type, 0);
    if (record == NULL)
        return NULL;
    record->group = mpicomm_reference((PyObject *)group);
    record->name = mpicomm_reference(name);
    record->dtype = mpicomm_reference(dtype);
    record->peer = mpicomm_reference(peer);
    record->count = PyLong_FromUnsignedLongLong(count);
    record->called_at = now();
    if (record->count == NULL || record->called_at == NULL || find_site(record, kind) < 0)
        Py_CLEAR(record);
    return record;
}

CallRecord *mpicomm_create_record(GroupRecord *group, int kind, PyObject *name, PyObject *dtype, uint64_t count,
                                  PyObject *peer, PyObject *options) {
    CallRecord *record = create(group, kind, name, dtype, count, peer);
    if (record == NULL)
        return NULL;
    record->is_message = mpicomm_reference(Py_False);
    record->usual_limit = mpicomm_reference(group->timeout);
    record->limit_or_options = mpicomm_reference(options); /* to read it would take tenths of a microsecond */
    return record;
}

int mpicomm_start_record(CallRecord *record) {
    GroupRecord *group = (GroupRecord *)record->group;
    record->start = mpicomm_reference(record->called_at);
    CHECK(take_number(record, group) == 0 && store(record) == 0);
    if (group->running != NULL && group->running != Py_None)
        return PyDict_SetItem(running, record->number, (PyObject *)record);
    mpicomm_replace(&group->running, mpicomm_reference((PyObject *)record));
    return 0;
}

/* Record that the call does not run now. */
static void stop(CallRecord *record) {
    GroupRecord *group = (GroupRecord *)record->group;
    if (group->running == (PyObject *)record)
        Py_CLEAR(group->running);
    else if (record->start != NULL && record->start != Py_None && record->number != NULL &&
             PyDict_DelItem(running, record->number) < 0)
        PyErr_Clear(); /* the world has ended meanwhile, or a wait timed out */
}

void mpicomm_postpone_record(CallRecord *record) {
    stop(record);
    Py_CLEAR(record->start);
}

/* Return the next number of a message with this name, peer and tag. */
static PyObject *next_message(PyObject *message_numbers, PyObject *name, PyObject *peer, PyObject *tag) {
    PyObject *number = NULL, *key = PyTuple_Pack(3, name, peer, tag);
    PyObject *counter = key != NULL ? PyObject_GetItem(message_numbers, key) : NULL;
    if (counter != NULL)
        number = PyIter_Next(counter);
    Py_XDECREF(counter);
    Py_XDECREF(key);
    return number;
}

CallRecord *mpicomm_record_message(GroupRecord *group, int kind, PyObject *name, PyObject *dtype, uint64_t count,
                                   PyObject *peer, PyObject *tag, PyObject *message_numbers) {
    CallRecord *record = create(group, kind, name, dtype, count, peer);
    if (record == NULL)
        return NULL;
    record->is_message = mpicomm_reference(Py_True);
    record->limit_or_options = mpicomm_reference(group->timeout);
    record->tag = mpicomm_reference(tag);
    record->message = next_message(message_numbers, name, peer, tag);
    if (record->message == NULL || store(record) < 0)
        Py_CLEAR(record);
    return record;
}

int mpicomm_begin_wait(CallRecord *record) {
    PyObject *time = now();
    CHECK(time != NULL);
    mpicomm_replace(&record->start, time);
    return PyDict_SetItem(running, record->number, (PyObject *)record);
}

int mpicomm_end_record(CallRecord *record) {
    PyObject *time = now();
    CHECK(time != NULL);
    mpicomm_replace(&record->end, time);
    stop(record);
    return 0;
}
