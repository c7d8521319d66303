/* The collectives of a group on plain tensors: from the arguments of torch's method to its Work.

   A tensor is plain if it is dense, on the CPU and of a common dtype. A call that does not qualify returns None without
   side effects, and the caller takes the general path, which prepares such tensors. A rank may take one path while
   another rank takes the other: both run the same steps of the slots, and call the same functions of MPI. */

#include "extension.h"
#include "mpi_functions.h"
#include "records.h"
#include "slots.h"
#include "torch_objects.h"

#include <limits.h>
#include <string.h>

#define NUM_OPERATIONS 8 /* with sizes */
#define MAX_ARGUMENTS 5
#define NOTED_BYTES (1 << 17)  /* from this size on, autograd is notified of a write; it takes about a microsecond */
#define QUICK_BYTES 4096       /* up to this size, a call that need not wait keeps the GIL */
#define LIST_BIT ((uint64_t)1 << LIST_SHIFT)

/* A method of torch's process groups. */
typedef struct {
    Operation operation;
    const char *name, *recorded;
    int arguments; /* before the options */
    PyObject *options, *recorded_name;
} Method;

/* One call, ready to run. */
typedef struct {
    const Method *method;
    const Dtype *dtype;
    uint64_t signature, numbers; /* as the slots take them */
    uint64_t count;              /* recorded elements */
    uint64_t nbytes;             /* of the larger tensor; 0 if not all ranks know it */
    uint64_t written;            /* bytes of each tensor that this rank writes */
    Row row;
    int root, uses_slots, has_begun;
    char *source, *out;
    Block *blocks; /* owned, as the references to the tensors, which another thread may drop during the call */
    PyObject *kept[2];
    PyObject *record, *options; /* of a barrier, which ends at its timeout; borrowed */
} Call;

typedef struct {
    PyObject_HEAD
    /* objects of the group's executor */
    PyObject *group, *executor, *state, *jobs, *acquire, *release, *queue, *fail, *run_by_mpi, *run_general, *keep_work;
    PyObject *batch, *make_job, *make_call, *add_first, *wake, *check_barrier;
    PyObject *spare; /* a job for the next call that begins in the call and continues in the queue */
    /* of its slots */
    PyObject *on_wait, *explain;
    Group *slots;
    int rank, size, reduces_in_place, has_threads, above, is_closed;
    uint64_t whole_bytes, step_bytes, eager_bytes, kept_elements;
    uint64_t least[NUM_OPERATIONS][2]; /* the size from which the algorithm `above` is used, by operation and row */
    Handle comm;
} PlainCalls;

typedef enum { GENERAL, SLOTS } Above; /* how calls of larger sizes run: by the general path, or by the slots */

/* -- objects of Python ------------------------------------------------------------------------------------------ */

static PyObject *sum, *average, *least, *most, *callbacks, *message_threads, *early_work, *note_writes;
static PyObject *n_async, *n_reduce_op, *n_root, *n_shape, *n_queue, *n_call, *n_work;
static PyObject *n_tensors, *n_operation, *n_flushes_denormals;
static Handle mpi_sum, in_place;

static Method methods[] = {
    {ALL_REDUCE, "allreduce", "all_reduce", 1, NULL, NULL},
    {REDUCE, "reduce", "reduce", 1, NULL, NULL},
    {REDUCE_SCATTER, "reduce_scatter_single", "reduce_scatter", 2, NULL, NULL},
    {BROADCAST, "broadcast", "broadcast", 1, NULL, NULL},
    {ALL_GATHER, "all_gather_single", "all_gather", 2, NULL, NULL},
    {ALL_GATHER, "allgather", "all_gather", 2, NULL, NULL},
    {GATHER, "gather", "gather", 2, NULL, NULL},
    {SCATTER, "scatter", "scatter", 2, NULL, NULL},
    {ALL_TO_ALL, "all_to_all_single", "all_to_all", 4, NULL, NULL},
    {BARRIER, "barrier", "barrier", 0, NULL, NULL},
};
enum {
    M_ALLREDUCE,
    M_REDUCE,
    M_REDUCE_SCATTER,
    M_BROADCAST,
    M_GATHER_SINGLE,
    M_ALLGATHER,
    M_GATHER,
    M_SCATTER,
    M_ALL_TO_ALL,
    M_BARRIER
};
#define NUM_METHODS (sizeof methods / sizeof *methods)

/* -- checks ----------------------------------------------------------------------------------------------------- */

/* Whether a tensor is plain, and not sent in chunks: where a rank passes GPU tensors through host memory, larger tensors
   are. */
static int read_tensor(const PlainCalls *self, PyObject *tensor, Memory *memory) {
    REQUIRE(mpicomm_read_tensor(tensor, memory));
    return memory->nbytes <= self->whole_bytes;
}

static void keep(Call *call, PyObject *object) {
    call->kept[call->kept[0] != NULL] = mpicomm_reference(object);
}

static void release(Call *call) {
    Py_CLEAR(call->kept[0]);
    Py_CLEAR(call->kept[1]);
    PyMem_Free(call->blocks);
    call->blocks = NULL;
}

static int read_kept(const PlainCalls *self, PyObject *tensor, Memory *memory, Call *call) {
    keep(call, tensor);
    return read_tensor(self, tensor, memory);
}

static int read_single(const PlainCalls *self, PyObject *list, Memory *memory, Call *call) {
    PyObject *tensor = mpicomm_single(list);
    return tensor == NULL ? 0 : read_kept(self, tensor, memory, call);
}

/* Whether `large` holds a block like `small` for each rank. */
static int are_blocks(const PlainCalls *self, const Memory *large, const Memory *small) {
    return large->dtype == small->dtype && large->count == small->count * (uint64_t)self->size;
}

static int overlap(const char *first, uint64_t first_bytes, const char *second, uint64_t second_bytes) {
    return first < second + second_bytes && second < first + first_bytes;
}

/* Whether slots would write over a part of a block of this rank before they read that part. */
static int is_endangered(const PlainCalls *self, const Memory *block, const char *other, uint64_t other_bytes) {
    if (block->nbytes <= self->step_bytes || !overlap(block->address, block->nbytes, other, other_bytes))
        return 0;
    return (block->address - other) % (ptrdiff_t)block->nbytes != 0;
}

static int compare_addresses(const void *first, const void *second) {
    const char *a = ((const Block *)first)->address, *b = ((const Block *)second)->address;
    return (a > b) - (a < b);
}

/* Whether a list of a list has a separate tensor like `block` for each rank. The blocks are those of the call. */
static int read_list(const PlainCalls *self, PyObject *lists, const Memory *block, Call *call) {
    PyObject *list = mpicomm_single(lists);
    if (list == NULL || !PyList_CheckExact(list) || PyList_Size(list) != self->size)
        return 0;
    size_t size = (size_t)self->size;
    if (block->nbytes > self->whole_bytes / size)
        return 0;
    PyObject *tensors = PyList_GetSlice(list, 0, self->size);
    CHECK(tensors != NULL);
    keep(call, tensors);
    Py_DECREF(tensors);
    if (PyList_Size(tensors) != self->size)
        return 0;
    call->blocks = PyMem_Malloc(2 * size * sizeof(Block));
    if (call->blocks == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int rank = 0; rank < self->size; rank++) {
        Memory memory;
        REQUIRE(read_tensor(self, PyList_GetItem(tensors, rank), &memory));
        REQUIRE(memory.dtype == block->dtype && memory.nbytes == block->nbytes);
        REQUIRE(!is_endangered(self, block, memory.address, memory.nbytes));
        call->blocks[rank] = (Block){memory.address, memory.nbytes};
    }
    Block *sorted = call->blocks + size;
    memcpy(sorted, call->blocks, size * sizeof(Block));
    qsort(sorted, size, sizeof(Block), compare_addresses);
    for (int rank = 1; rank < self->size; rank++)
        if ((uint64_t)(sorted[rank].address - sorted[rank - 1].address) < block->nbytes)
            return 0;
    return 1;
}

/* Whether the options have the class of the method, and their root, if it has one, is a rank. */
static int read_options(const PlainCalls *self, PyObject *options, Call *call, int has_root) {
    REQUIRE((PyObject *)Py_TYPE(options) == call->method->options);
    call->root = -1;
    if (!has_root)
        return 1;
    PyObject *root = PyObject_GetAttr(options, n_root);
    CHECK(root != NULL);
    long number = PyLong_AsLong(root);
    Py_DECREF(root);
    CHECK(number != -1 || !PyErr_Occurred());
    call->root = (int)number;
    return number >= 0 && number < self->size;
}

/* Whether the reduction is a sum, an average or an extreme that the slots can compute. */
static int read_reduction(const PlainCalls *self, PyObject *options, const Dtype *dtype, Call *call) {
    PyObject *op = PyObject_GetAttr(options, n_reduce_op);
    CHECK(op != NULL);
    const Row compared = dtype->compared_kind < 0 ? IMPOSSIBLE : CONVERTED; /* only slots compare numbers here */
    PyObject *const known[] = {sum, average, least, most};
    const Row rows[] = {dtype->sum, dtype->average, compared, compared};
    int is_equal = 0, number = 0;
    while (number < 4 && (is_equal = PyObject_RichCompareBool(op, known[number], Py_EQ)) == 0)
        number++;
    Py_DECREF(op);
    CHECK(is_equal >= 0);
    call->row = is_equal ? rows[number] : IMPOSSIBLE;
    REQUIRE(call->row != IMPOSSIBLE);
    uint64_t divisor = known[number] == average ? (uint64_t)self->size : 1;
    uint64_t extreme = known[number] == least ? LEAST : known[number] == most ? MOST : NO_EXTREME;
    uint64_t kind = (uint64_t)(extreme != NO_EXTREME ? dtype->compared_kind : dtype->kind);
    uint64_t root = call->root < 0 ? 0 : (uint64_t)call->root;
    call->signature = (uint64_t)call->method->operation | kind << KIND_SHIFT | extreme << EXTREME_SHIFT |
                      root << ROOT_SHIFT | divisor << DIVISOR_SHIFT | dtype->code << DTYPE_SHIFT;
    return 1;
}

/* The same for an operation that moves bytes. */
static void read_movement(Call *call, const Dtype *dtype) {
    uint64_t root = call->root < 0 ? 0 : (uint64_t)call->root;
    call->row = NATIVE;
    call->signature = (uint64_t)call->method->operation | (uint64_t)INT8 << KIND_SHIFT | root << ROOT_SHIFT |
                      (uint64_t)1 << DIVISOR_SHIFT | dtype->code << DTYPE_SHIFT;
}

/* Select the algorithm; return 0 for the general path. */
static int select_algorithm(const PlainCalls *self, Call *call) {
    int is_above = call->nbytes >= self->least[call->method->operation][call->row];
    call->uses_slots = is_above && self->above == SLOTS;
    if (call->uses_slots)
        return 1;
    return !is_above && call->row == NATIVE && self->comm != 0 && call->count <= INT_MAX &&
           (call->signature & LIST_BIT) == 0; /* MPI would need a copy of all blocks */
}

/* -- the calls of each operation -------------------------------------------------------------------------------- */

static int prepare_allreduce(const PlainCalls *self, PyObject *const *args, Call *call) {
    Memory tensor;
    REQUIRE(read_options(self, args[1], call, 0));
    REQUIRE(read_single(self, args[0], &tensor, call));
    REQUIRE(read_reduction(self, args[1], tensor.dtype, call));
    call->dtype = tensor.dtype, call->source = call->out = tensor.address;
    call->count = call->numbers = tensor.count, call->nbytes = call->written = tensor.nbytes;
    return select_algorithm(self, call);
}

static int prepare_reduce(const PlainCalls *self, PyObject *const *args, Call *call) {
    Memory tensor;
    REQUIRE(read_options(self, args[1], call, 1));
    REQUIRE(read_single(self, args[0], &tensor, call));
    REQUIRE(read_reduction(self, args[1], tensor.dtype, call));
    call->dtype = tensor.dtype, call->source = call->out = tensor.address;
    call->count = call->numbers = tensor.count, call->nbytes = tensor.nbytes;
    call->written = self->rank == call->root ? tensor.nbytes : 0;
    REQUIRE(select_algorithm(self, call));
    return call->uses_slots || call->root == 0 || self->reduces_in_place;
}

static int prepare_reduce_scatter(const PlainCalls *self, PyObject *const *args, Call *call) {
    Memory output, source;
    REQUIRE(read_options(self, args[2], call, 0));
    REQUIRE(read_kept(self, args[1], &source, call));
    REQUIRE(read_kept(self, args[0], &output, call));
    REQUIRE(are_blocks(self, &source, &output));
    REQUIRE(read_reduction(self, args[2], output.dtype, call));
    call->dtype = output.dtype, call->source = source.address, call->out = output.address;
    call->count = source.count, call->nbytes = source.nbytes;
    call->numbers = output.count, call->written = output.nbytes;
    REQUIRE(select_algorithm(self, call));
    int is_own_block = output.address == source.address + (uint64_t)self->rank * output.nbytes;
    return (call->uses_slots && is_own_block) ||
           !overlap(source.address, source.nbytes, output.address, output.nbytes);
}

static int prepare_broadcast(const PlainCalls *self, PyObject *const *args, Call *call) {
    Memory tensor;
    REQUIRE(read_options(self, args[1], call, 1));
    REQUIRE(read_single(self, args[0], &tensor, call));
    read_movement(call, tensor.dtype);
    call->dtype = tensor.dtype, call->source = call->out = tensor.address;
    call->count = tensor.count, call->numbers = call->nbytes = tensor.nbytes;
    call->written = self->rank == call->root ? 0 : tensor.nbytes;
    return select_algorithm(self, call);
}

static int prepare_all_gather_single(const PlainCalls *self, PyObject *const *args, Call *call) {
    Memory output, source;
    REQUIRE(read_options(self, args[2], call, 0));
    REQUIRE(read_kept(self, args[0], &output, call));
    REQUIRE(read_kept(self, args[1], &source, call));
    REQUIRE(are_blocks(self, &output, &source));
    read_movement(call, source.dtype);
    call->dtype = source.dtype, call->source = source.address, call->out = output.address;
    call->count = source.count, call->numbers = source.nbytes, call->nbytes = call->written = output.nbytes;
    REQUIRE(select_algorithm(self, call));
    if (!call->uses_slots) /* the general path compares the same number */
        return output.count <= INT_MAX;
    return !is_endangered(self, &source, output.address, output.nbytes);
}

/* Read the options and the single tensor of an operation whose other tensors are a list of blocks. */
static int read_block(const PlainCalls *self, PyObject *options, int has_root, PyObject *list, Memory *block,
                      Call *call) {
    REQUIRE(read_options(self, options, call, has_root));
    REQUIRE(read_single(self, list, block, call));
    read_movement(call, block->dtype);
    call->signature |= LIST_BIT;
    call->dtype = block->dtype, call->count = block->count, call->numbers = block->nbytes;
    return 1;
}

static int prepare_allgather(const PlainCalls *self, PyObject *const *args, Call *call) {
    Memory source;
    REQUIRE(read_block(self, args[2], 0, args[1], &source, call));
    REQUIRE(read_list(self, args[0], &source, call));
    call->source = source.address, call->out = (char *)call->blocks;
    call->count = source.count * (uint64_t)self->size, call->nbytes = source.nbytes * (uint64_t)self->size;
    call->written = source.nbytes;
    return select_algorithm(self, call);
}

static int prepare_gather(const PlainCalls *self, PyObject *const *args, Call *call) {
    Memory source;
    REQUIRE(read_block(self, args[2], 1, args[1], &source, call));
    if (self->rank == call->root) {
        REQUIRE(read_list(self, args[0], &source, call));
        call->written = source.nbytes;
    }
    call->source = source.address, call->out = (char *)call->blocks;
    return select_algorithm(self, call);
}

static int prepare_scatter(const PlainCalls *self, PyObject *const *args, Call *call) {
    Memory output;
    REQUIRE(read_block(self, args[2], 1, args[0], &output, call));
    call->source = output.address; /* NULL would mean: not on the host */
    if (self->rank == call->root) {
        REQUIRE(read_list(self, args[1], &output, call));
        call->source = (char *)call->blocks;
    }
    call->out = output.address, call->written = output.nbytes;
    return select_algorithm(self, call);
}

/* Whether a tensor has at least one dimension, whose size is a multiple of the number of ranks. */
static int has_rows(const PlainCalls *self, PyObject *tensor) {
    PyObject *shape = PyObject_GetAttr(tensor, n_shape);
    CHECK(shape != NULL);
    long long rows = -1;
    if (PyTuple_Size(shape) > 0)
        rows = PyLong_AsLongLong(PyTuple_GetItem(shape, 0));
    Py_DECREF(shape);
    CHECK(!PyErr_Occurred());
    return rows >= 0 && rows % self->size == 0;
}

/* Whether an argument is an empty list, an empty tuple or None. */
static int is_empty(PyObject *object) {
    return object == Py_None || (PyList_CheckExact(object) && PyList_Size(object) == 0) ||
           (PyTuple_CheckExact(object) && PyTuple_Size(object) == 0);
}

static int prepare_all_to_all_single(const PlainCalls *self, PyObject *const *args, Call *call) {
    Memory output, source;
    REQUIRE(read_options(self, args[4], call, 0));
    REQUIRE(is_empty(args[2]) && is_empty(args[3]));
    REQUIRE(read_kept(self, args[0], &output, call));
    REQUIRE(read_kept(self, args[1], &source, call));
    REQUIRE(output.dtype == source.dtype && output.nbytes == source.nbytes);
    REQUIRE(has_rows(self, args[0]));
    REQUIRE(has_rows(self, args[1]));
    REQUIRE(!overlap(output.address, output.nbytes, source.address, source.nbytes));
    read_movement(call, source.dtype);
    call->dtype = source.dtype, call->source = source.address, call->out = output.address;
    call->count = source.count, call->nbytes = source.nbytes;
    call->written = output.nbytes, call->numbers = output.nbytes / (uint64_t)self->size;
    return select_algorithm(self, call);
}

static const Dtype *no_dtype; /* of a barrier: None */

/* A barrier runs in slots; without them, the general path has a barrier of MPI that ends at a timeout. */
static int prepare_barrier(const PlainCalls *self, PyObject *const *args, Call *call) {
    REQUIRE(self->above == SLOTS && self->slots != NULL);
    REQUIRE(read_options(self, args[0], call, 0));
    read_movement(call, no_dtype);
    call->dtype = no_dtype, call->options = args[0], call->uses_slots = 1;
    call->source = call->out = (char *)self->slots; /* NULL would mean: not on the host */
    return 1;
}

/* -- running ---------------------------------------------------------------------------------------------------- */

/* Whether none of the tensors of a call in slots is larger. */
static int is_within(const Call *call, uint64_t bytes) {
    return call->nbytes <= bytes && call->written <= bytes && call->numbers * call->dtype->item <= bytes;
}

/* Whether other ranks' blocks may be larger than that of this rank. */
static int may_differ(const Call *call) {
    return call->method->operation == GATHER || call->method->operation == SCATTER;
}

static int raise_destroyed(void) {
    PyErr_SetString(PyExc_RuntimeError,
                    "the group was destroyed before the operation.\nDestroy it when no thread uses it.");
    return -1;
}

/* Check the timeout of a barrier, and sleep; other calls have none. */
static int check_barrier(const PlainCalls *self, const Call *call) {
    if (call->record == NULL)
        return 0;
    return mpicomm_drop(PyObject_CallFunctionObjArgs(self->check_barrier, call->record, call->options, NULL));
}

/* Run a call in slots; return how it ended. `on_wait` and `explain` keep the slots alive. */
static int run_in(PlainCalls *self, Group *slots, const Call *call, PyObject *on_wait, PyObject *explain) {
    int status;
    if (!call->has_begun)
        mpicomm_begin(slots, call->signature, call->source, call->out, call->numbers);
    else
        slots->source = call->source, slots->out = call->out; /* the tensors may have other memory now */
    int is_quick = is_within(call, QUICK_BYTES < self->step_bytes ? QUICK_BYTES : self->step_bytes);
    if (is_quick && !may_differ(call) && mpicomm_all_have_begun(slots)) {
        status = mpicomm_continue(slots);
    } else {
        Py_BEGIN_ALLOW_THREADS
        status = mpicomm_continue(slots);
        Py_END_ALLOW_THREADS
    }
    while (status == WAITING) {
        CHECK(check_barrier(self, call) == 0);
        CHECK(mpicomm_drop(PyObject_CallNoArgs(on_wait)) == 0); /* also runs signal handlers */
        Py_BEGIN_ALLOW_THREADS
        status = mpicomm_continue(slots);
        Py_END_ALLOW_THREADS
    }
    if (status == DIFFERENT) {
        if (mpicomm_drop(PyObject_CallNoArgs(explain)) == 0)
            PyErr_SetString(PyExc_SystemError, "the ranks call different operations");
        return -1;
    }
    return status;
}

static int run_slots(PlainCalls *self, const Call *call) {
    if (self->slots == NULL)
        return raise_destroyed();
    PyObject *on_wait = mpicomm_reference(self->on_wait), *explain = mpicomm_reference(self->explain);
    int status = run_in(self, self->slots, call, on_wait, explain);
    Py_DECREF(on_wait);
    Py_DECREF(explain);
    return status;
}

static int call_mpi(const PlainCalls *self, const Call *call) {
    const Dtype *dtype = call->dtype;
    const void *here = (const void *)in_place;
    intptr_t count = (intptr_t)call->count, block = count / self->size;
    switch (call->method->operation) {
    case ALL_REDUCE:
        return mpicomm_mpi.allreduce(here, call->out, count, dtype->arithmetic, mpi_sum, self->comm);
    case REDUCE:
        return mpicomm_mpi.reduce(self->rank == call->root ? here : call->source, call->out, count, dtype->arithmetic,
                                  mpi_sum, call->root, self->comm);
    case REDUCE_SCATTER:
        return mpicomm_mpi.reduce_scatter_block(call->source, call->out, block, dtype->arithmetic, mpi_sum, self->comm);
    case BROADCAST:
        return mpicomm_mpi.bcast(call->out, count, dtype->carrier, call->root, self->comm);
    case ALL_GATHER:
        memmove(call->out + call->numbers * (uint64_t)self->rank, call->source, call->numbers);
        return mpicomm_mpi.allgather(here, 0, dtype->carrier, call->out, count, dtype->carrier, self->comm);
    default: /* ALL_TO_ALL */
        return mpicomm_mpi.alltoall(call->source, block, dtype->carrier, call->out, block, dtype->carrier, self->comm);
    }
}

/* Return a copy of the lists and the lists in them, which the caller may change. */
static PyObject *copy_of(PyObject *object) {
    if (!PyList_CheckExact(object))
        return mpicomm_reference(object);
    PyObject *copy = PyList_GetSlice(object, 0, PyList_Size(object));
    for (Py_ssize_t i = 0; copy != NULL && i < PyList_Size(copy); i++) {
        PyObject *item = copy_of(PyList_GetItem(copy, i));
        if (item == NULL)
            Py_CLEAR(copy);
        else
            PyList_SetItem(copy, i, item);
    }
    return copy;
}

/* Return the arguments and the options of a method, with copies of the lists. */
static PyObject *copy_arguments(const Method *method, PyObject *const *args) {
    PyObject *tuple = PyTuple_New(method->arguments + 1);
    for (int i = 0; tuple != NULL && i <= method->arguments; i++) {
        PyObject *item = copy_of(args[i]);
        if (item == NULL)
            Py_CLEAR(tuple);
        else
            PyTuple_SetItem(tuple, i, item);
    }
    return tuple;
}

/* Run a call by a function in Python. */
static int run_in_python(PyObject *function, const Method *method, PyObject *const *args) {
    PyObject *tuple = copy_arguments(method, args);
    CHECK(tuple != NULL);
    int result = mpicomm_drop(PyObject_CallFunction(function, "sO", method->name, tuple));
    Py_DECREF(tuple);
    return result;
}

static int notify_autograd(const Call *call, PyObject *results) {
    return call->written < NOTED_BYTES ? 0 : mpicomm_drop(PyObject_CallFunctionObjArgs(note_writes, results, NULL));
}

/* Run a call on this thread; -1 with an exception. The arguments are those of the method. */
static int run(PlainCalls *self, const Call *call, PyObject *const *args, PyObject *results) {
    if (call->uses_slots) {
        int status = run_slots(self, call);
        CHECK(status >= 0);
        if (status == UNAVAILABLE) /* a rank's tensor is not on the host */
            CHECK(run_in_python(self->run_by_mpi, call->method, args) == 0);
        return notify_autograd(call, results);
    }
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = call_mpi(self, call);
    Py_END_ALLOW_THREADS
    return error == 0 ? 0 : mpicomm_raise_mpi(error);
}

/* -- a call in the queue ---------------------------------------------------------------------------------------- */

typedef int (*Prepare)(const PlainCalls *, PyObject *const *, Call *);

/* A call that the group's queue runs, without arguments. */
typedef struct {
    PyObject_HEAD
    PlainCalls *owner;
    PyObject *args, *results; /* copies of the lists */
    const Method *method;
    Prepare prepare;
    uint64_t signature, numbers, addresses; /* of the call */
    PyObject *record;            /* of a barrier that has begun */
    int has_begun;
} QueuedCall;

static PyObject *queued_call_type;

/* A number of the memory of a call. */
static uint64_t addresses_of(const PlainCalls *self, const Call *call) {
    const char *const both[] = {call->source, call->out}, *blocks = (const char *)call->blocks;
    uint64_t found = 0;
    for (int i = 0; i < 2; i++)
        if (both[i] != blocks)
            found = found * 31 + (uint64_t)(uintptr_t)both[i];
    for (int rank = 0; blocks != NULL && rank < self->size; rank++)
        found = found * 31 + (uint64_t)(uintptr_t)call->blocks[rank].address;
    return found;
}

/* Whether a call can continue with its arguments as they are now: it must write all of its result to one memory. */
static int is_same_call(const QueuedCall *queued, const Call *call) {
    if (call->signature != queued->signature || call->numbers != queued->numbers)
        return 0;
    return !call->has_begun || addresses_of(queued->owner, call) == queued->addresses ||
           !mpicomm_has_written(queued->owner->slots);
}

static PyObject *run_queued(PyObject *self, PyObject *args, PyObject *keywords) {
    QueuedCall *queued = (QueuedCall *)self;
    PyObject *arguments[MAX_ARGUMENTS];
    Call call = {.method = queued->method, .has_begun = queued->has_begun, .record = queued->record};
    (void)args, (void)keywords;
    for (int i = 0; i <= queued->method->arguments; i++)
        if ((arguments[i] = PyTuple_GetItem(queued->args, i)) == NULL)
            return NULL;
    if (queued->owner->is_closed)
        return raise_destroyed(), NULL;
    int result = queued->prepare(queued->owner, arguments, &call); /* again: their memory may have moved */
    int is_same = result > 0 ? is_same_call(queued, &call) : !call.has_begun;
    if (result >= 0 && !is_same) {
        PyErr_SetString(PyExc_RuntimeError, "a tensor or the options of an operation were changed before it completed.\n"
                                            "Call wait() on its work first.");
        result = -1;
    } else if (result > 0) {
        result = run(queued->owner, &call, arguments, queued->results);
    } else if (result == 0) {
        result = run_in_python(queued->owner->run_general, queued->method, arguments);
    }
    release(&call);
    return result < 0 ? NULL : mpicomm_reference(Py_None);
}

static void free_queued(PyObject *self) {
    QueuedCall *queued = (QueuedCall *)self;
    PyTypeObject *type = Py_TYPE(self);
    Py_CLEAR(queued->owner);
    Py_CLEAR(queued->args);
    Py_CLEAR(queued->results);
    Py_CLEAR(queued->record);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot queued_slots[] = {{Py_tp_call, run_queued}, {Py_tp_dealloc, free_queued}, {0, NULL}};
static PyType_Spec queued_spec = {"mpicomm.native.hot_path.QueuedCall", sizeof(QueuedCall), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                  queued_slots};

static PyObject *root_of(const Call *call) {
    return call->root < 0 ? mpicomm_reference(Py_None) : PyLong_FromLong(call->root);
}

static QueuedCall *create_queued(PlainCalls *self, const Call *call, Prepare prepare, PyObject *const *args,
                                 PyObject *results) {
    QueuedCall *queued = PyObject_New(QueuedCall, (PyTypeObject *)queued_call_type);
    if (queued == NULL)
        return NULL;
    queued->owner = (PlainCalls *)mpicomm_reference((PyObject *)self);
    queued->method = call->method, queued->prepare = prepare, queued->has_begun = 0, queued->record = NULL;
    queued->signature = call->signature, queued->numbers = call->numbers;
    queued->addresses = addresses_of(self, call);
    queued->args = copy_arguments(call->method, args);
    queued->results = copy_of(results);
    if (queued->args == NULL || queued->results == NULL)
        Py_CLEAR(queued);
    return queued;
}

/* Queue a call; return its work. */
static PyObject *queue_call(PlainCalls *self, const Call *call, Prepare prepare, PyObject *const *args,
                            PyObject *results) {
    PyObject *work = NULL, *root = root_of(call);
    QueuedCall *queued = root != NULL ? create_queued(self, call, prepare, args, results) : NULL;
    if (queued != NULL)
        work = PyObject_CallFunction(self->queue, "OOOKOOO", queued, call->method->recorded_name, call->dtype->dtype,
                                     (unsigned long long)call->count, root, args[call->method->arguments],
                                     queued->results);
    Py_XDECREF(root);
    Py_XDECREF((PyObject *)queued);
    return work;
}

/* -- a call on this thread -------------------------------------------------------------------------------------- */

/* Whether nothing is queued, and this thread has the group's lock now. */
static int take_turn(PlainCalls *self) {
    Py_ssize_t jobs = PyObject_Size(self->jobs), pending = PyList_Size(callbacks);
    CHECK(jobs >= 0 && pending >= 0);
    REQUIRE(jobs == 0 && pending == 0 && PyList_Size(message_threads) == 0);
    REQUIRE(mpicomm_is_usable((GroupRecord *)self->group, self->state));
    PyObject *result = PyObject_CallFunctionObjArgs(self->acquire, Py_False, NULL);
    CHECK(result != NULL);
    Py_DECREF(result);
    return result == Py_True;
}

static int end_turn(PlainCalls *self) { return mpicomm_drop(PyObject_CallNoArgs(self->release)); }

/* After an error: let the executor record it, which may replace it, and end the turn. */
static void fail_turn(PlainCalls *self, CallRecord *record) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    int result = 0;
    if (record != NULL && record->start != NULL)
        result = mpicomm_drop(PyObject_CallFunctionObjArgs(self->fail, (PyObject *)record, error, NULL));
    if (result == 0) {
        PyErr_Restore(type, error, traceback);
    } else {
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
    }
    PyErr_Fetch(&type, &error, &traceback); /* the rest must happen, also after a signal handler's exception */
    if (record != NULL && mpicomm_end_record(record) < 0)
        PyErr_Clear();
    if (end_turn(self) < 0)
        PyErr_Clear();
    PyErr_Restore(type, error, traceback);
}

static CallRecord *create_record(PlainCalls *self, const Call *call, PyObject *const *args) {
    const Method *method = call->method;
    PyObject *root = root_of(call);
    CallRecord *record = NULL;
    if (root != NULL)
        record = mpicomm_create_record((GroupRecord *)self->group, (int)method->operation, method->recorded_name,
                                       call->dtype->dtype, call->count, root, args[method->arguments]);
    Py_XDECREF(root);
    return record;
}

/* Run a call at its turn; return its work. */
static PyObject *run_now(PlainCalls *self, const Call *call, PyObject *const *args, PyObject *results,
                         CallRecord *record) {
    if (mpicomm_start_record(record) < 0 || run(self, call, args, results) < 0 || mpicomm_end_record(record) < 0) {
        fail_turn(self, record);
        return NULL;
    }
    return end_turn(self) == 0 ? mpicomm_work(mpicomm_completed_work, results) : NULL;
}

/* -- an asynchronous call that begins at once -------------------------------------------------------------------- */

/* Other ranks have the contribution of such a call, so that it must complete. A signal handler may raise an exception in
   any code of Python, or call operations there: none runs from the contribution until the call is in the queue. */

/* Keep the work of few elements alive after its caller has dropped it, as the executor does. */
static int keep_alive(PlainCalls *self, const Call *call, PyObject *work) {
    if (call->count > self->kept_elements || call->written > self->kept_elements * call->dtype->item)
        return 0;
    return mpicomm_drop(PyObject_CallFunctionObjArgs(self->keep_work, work, NULL));
}

/* Have a job for a call that does not complete at once. */
static int make_spare(PlainCalls *self) {
    if (self->spare != NULL)
        return 0;
    PyObject *job = PyObject_CallNoArgs(self->make_job);
    CHECK(job != NULL);
    mpicomm_replace(&self->spare, job);
    return 0;
}

/* Whether this thread computes with denormal numbers as zero. */
static int flushes_denormals(void) {
    static volatile double smallest = 4.9406564584124654e-324;
    return smallest * 2 == 0;
}

/* Fill in a job, and its work, for a call that the queue continues. */
static int fill_job(PlainCalls *self, const Call *call, QueuedCall *queued, CallRecord *record, PyObject *job,
                    PyObject *work) {
    PyObject *run = PyObject_CallFunction(self->make_call, "OOsO", record, queued, "", Py_None);
    CHECK(run != NULL);
    int result = PyObject_SetAttr(job, n_call, run);
    Py_DECREF(run);
    CHECK(result == 0 && PyObject_SetAttr(job, n_flushes_denormals, flushes_denormals() ? Py_True : Py_False) == 0);
    CHECK(PyObject_SetAttr(work, n_tensors, queued->results) == 0);
    CHECK(PyObject_SetAttr(work, n_operation, (PyObject *)record) == 0);
    CHECK(mpicomm_add_to_batch(self->batch, work) == 0);
    return keep_alive(self, call, work);
}

/* Let the worker's thread continue a job if nobody waits for it; also after an exception of a signal handler. */
static int wake(PlainCalls *self, PyObject *job) {
    if (mpicomm_drop(PyObject_CallFunctionObjArgs(self->wake, job, NULL)) == 0)
        return 0;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (mpicomm_drop(PyObject_CallFunctionObjArgs(self->wake, job, NULL)) < 0)
        PyErr_Clear();
    PyErr_Restore(type, error, traceback);
    return -1;
}

/* Queue a call that has begun, as the first, by a job; return its work. */
static PyObject *continue_later(PlainCalls *self, const Call *call, QueuedCall *queued, CallRecord *record,
                                PyObject *job) {
    PyObject *work = PyObject_GetAttr(job, n_work);
    queued->has_begun = 1;
    if (call->record != NULL)
        queued->record = mpicomm_reference(call->record);
    int result = work == NULL ? -1 : fill_job(self, call, queued, record, job, work);
    if (result == 0) {
        mpicomm_postpone_record(record);
        result = mpicomm_drop(PyObject_CallFunctionObjArgs(self->add_first, job, NULL));
    }
    if (result < 0) {
        mpicomm_replace(&record->start, mpicomm_reference(record->called_at)); /* it has begun, so the group breaks */
        fail_turn(self, record);
    } else if (end_turn(self) < 0 || wake(self, job) < 0)
        result = -1;
    if (result < 0)
        Py_CLEAR(work);
    return work;
}

/* Return the work of a call that has completed in the call. */
static PyObject *complete_early(PlainCalls *self, const Call *call, QueuedCall *queued, CallRecord *record) {
    PyObject *work = NULL;
    if (mpicomm_end_record(record) < 0)
        fail_turn(self, record);
    else if (end_turn(self) == 0 && notify_autograd(call, queued->results) == 0)
        work = mpicomm_work(early_work, queued->results);
    if (work != NULL && (PyObject_SetAttr(work, n_queue, self->executor) < 0 || keep_alive(self, call, work) < 0 ||
                         mpicomm_add_to_batch(self->batch, work) < 0))
        Py_CLEAR(work);
    return work;
}

/* Begin an asynchronous call at its turn. It completes if all ranks have begun it, as in programs whose ranks are in
   step; otherwise the queue continues it. Other ranks never wait for the rest of it. */
static PyObject *start_now(PlainCalls *self, const Call *call, Prepare prepare, PyObject *const *args,
                           PyObject *results, CallRecord *record) {
    int has_completed;
    QueuedCall *queued = create_queued(self, call, prepare, args, results);
    if (queued == NULL || mpicomm_start_record(record) < 0) {
        Py_XDECREF((PyObject *)queued);
        fail_turn(self, record);
        return NULL;
    }
    PyObject *explain = mpicomm_reference(self->explain); /* keeps the slots alive */
    PyObject *job = mpicomm_reference(self->spare);       /* which another thread clears if it destroys the group */
    Group *slots = self->slots;
    mpicomm_begin(slots, call->signature, call->source, call->out, call->numbers);
    Py_BEGIN_ALLOW_THREADS
    has_completed = mpicomm_complete_soon(slots);
    Py_END_ALLOW_THREADS
    Py_DECREF(explain);
    if (!has_completed)
        Py_CLEAR(self->spare);
    PyObject *work = has_completed ? complete_early(self, call, queued, record)
                                   : continue_later(self, call, queued, record, job);
    Py_DECREF(job);
    Py_DECREF((PyObject *)queued);
    return work;
}

/* -- from the arguments to the work ------------------------------------------------------------------------------ */

/* Queue a call behind others; a barrier, which may run without slots then, takes the general path. */
static PyObject *start_later(PlainCalls *self, const Call *call, Prepare prepare, PyObject *const *args,
                             PyObject *results) {
    if (call->method->operation == BARRIER)
        Py_RETURN_NONE;
    return queue_call(self, call, prepare, args, results);
}

/* Run a plain call now, or queue it; return its work. */
static PyObject *start(PlainCalls *self, Call *call, Prepare prepare, PyObject *const *args, PyObject *results) {
    PyObject *work = NULL;
    int is_async = mpicomm_is_true(args[call->method->arguments], n_async), has_turn = 0;
    int is_eager = is_async > 0 && self->has_threads && call->uses_slots && self->slots != NULL &&
                   is_within(call, self->eager_bytes);
    Py_ssize_t jobs = PyObject_Size(self->jobs);
    if (is_async < 0 || jobs < 0)
        return NULL;
    if (jobs > 0 || (is_async && !is_eager)) /* the queue makes records itself; without threads, it raises an error */
        return start_later(self, call, prepare, args, results);
    CallRecord *record = create_record(self, call, args); /* before the turn: no code in Python follows */
    if (record != NULL && call->method->operation == BARRIER) {
        call->record = (PyObject *)record;
        mpicomm_replace(&record->limit_or_options, mpicomm_reference(Py_None)); /* it raises TimeoutError itself */
    }
    if (record != NULL && (!is_eager || make_spare(self) == 0) && (has_turn = take_turn(self)) >= 0) {
        if (!has_turn)
            work = start_later(self, call, prepare, args, results);
        else if (is_async)
            work = start_now(self, call, prepare, args, results, record);
        else
            work = run_now(self, call, args, results, record);
    }
    Py_XDECREF((PyObject *)record);
    return work;
}

/* Start a call; None for the general path. */
static PyObject *submit(PlainCalls *self, PyObject *const *args, int index, Prepare prepare, PyObject *results) {
    Call call = {.method = &methods[index]};
    PyObject *work = NULL;
    int result = mpicomm_needs_general_path();
    result = result < 0 ? -1 : result > 0 ? 0 : prepare(self, args, &call);
    if (result > 0)
        work = start(self, &call, prepare, args, results);
    else if (result == 0)
        work = mpicomm_reference(Py_None);
    release(&call);
    return work;
}

/* Results: what the method writes on this rank, a new reference. */

static PyObject *first_or_empty(PyObject *lists) {
    PyObject *list = mpicomm_single(lists);
    return list != NULL ? mpicomm_reference(list) : PyList_New(0);
}

#define DEFINE_METHOD(NAME, INDEX, RESULTS)                                                                            \
    static PyObject *NAME(PyObject *self, PyObject *const *args, Py_ssize_t number) {                                  \
        if (number != methods[INDEX].arguments + 1)                                                                    \
            Py_RETURN_NONE;                                                                                            \
        PyObject *results = RESULTS;                                                                                   \
        if (results == NULL)                                                                                           \
            return NULL;                                                                                               \
        PyObject *work = submit((PlainCalls *)self, args, INDEX, prepare_##NAME, results);                             \
        Py_DECREF(results);                                                                                            \
        return work;                                                                                                   \
    }

DEFINE_METHOD(allreduce, M_ALLREDUCE, mpicomm_reference(args[0]))
DEFINE_METHOD(reduce, M_REDUCE, mpicomm_reference(args[0]))
DEFINE_METHOD(reduce_scatter, M_REDUCE_SCATTER, mpicomm_list(args[0]))
DEFINE_METHOD(broadcast, M_BROADCAST, mpicomm_reference(args[0]))
DEFINE_METHOD(all_gather_single, M_GATHER_SINGLE, mpicomm_list(args[0]))
DEFINE_METHOD(allgather, M_ALLGATHER, first_or_empty(args[0]))
DEFINE_METHOD(gather, M_GATHER, first_or_empty(args[0]))
DEFINE_METHOD(scatter, M_SCATTER, mpicomm_reference(args[0]))
DEFINE_METHOD(all_to_all_single, M_ALL_TO_ALL, mpicomm_list(args[0]))
DEFINE_METHOD(barrier, M_BARRIER, PyList_New(0))

/* -- the type --------------------------------------------------------------------------------------------------- */

static const char use_doc[] =
    "use(rows)\n--\n\nUse MPI below the sizes of `rows`, and from them on the general path.\n\n"
    "Args:\n    rows: For each operation, the smallest sizes in bytes for its native and for its converted form.";
static const char use_slots_doc[] =
    "use_slots(rows, address, step_bytes, eager_bytes, on_wait, explain)\n--\n\n"
    "The same, with slots from these sizes on.\n\n"
    "Args:\n    address: Of the ctypes structure SlotState.\n"
    "    step_bytes: The largest block that moves in one step.\n"
    "    eager_bytes: Up to this size, an asynchronous call begins before it returns.\n"
    "    on_wait: Called every millisecond while other ranks are late; may raise an exception.\n"
    "    explain: Raises the error of ranks that call different operations.";

static int take_rows(PlainCalls *self, PyObject *rows) {
    for (int operation = 0; operation < NUM_OPERATIONS; operation++) {
        unsigned long long native, converted;
        PyObject *row = PySequence_GetItem(rows, operation);
        CHECK(row != NULL);
        int is_pair = PyArg_ParseTuple(row, "KK", &native, &converted);
        Py_DECREF(row);
        CHECK(is_pair);
        self->least[operation][NATIVE] = native, self->least[operation][CONVERTED] = converted;
    }
    return 0;
}

static void drop_slots(PlainCalls *self) {
    self->slots = NULL;
    Py_CLEAR(self->on_wait);
    Py_CLEAR(self->explain);
}

static PyObject *use(PyObject *object, PyObject *args) {
    PlainCalls *self = (PlainCalls *)object;
    PyObject *rows;
    if (!PyArg_ParseTuple(args, "O", &rows) || take_rows(self, rows) < 0)
        return NULL;
    self->above = GENERAL;
    drop_slots(self);
    Py_RETURN_NONE;
}

static PyObject *close_calls(PyObject *object, PyObject *none) {
    PlainCalls *self = (PlainCalls *)object;
    (void)none;
    self->is_closed = 1, self->comm = 0;
    Py_CLEAR(self->spare);
    drop_slots(self);
    Py_RETURN_NONE;
}

static PyObject *use_slots(PyObject *object, PyObject *args) {
    PlainCalls *self = (PlainCalls *)object;
    PyObject *rows, *on_wait, *explain;
    unsigned long long address, step_bytes, eager_bytes;
    if (!PyArg_ParseTuple(args, "OKKKOO", &rows, &address, &step_bytes, &eager_bytes, &on_wait, &explain) ||
        take_rows(self, rows) < 0)
        return NULL;
    self->slots = (Group *)(uintptr_t)address, self->above = SLOTS;
    self->step_bytes = step_bytes, self->eager_bytes = eager_bytes;
    mpicomm_replace(&self->on_wait, mpicomm_reference(on_wait));
    mpicomm_replace(&self->explain, mpicomm_reference(explain));
    Py_RETURN_NONE;
}

#define NUM_TAKEN 17 /* members from the executor */
#define NUM_MEMBERS (NUM_TAKEN + 3)
#define MEMBERS(SELF) (&((PlainCalls *)(SELF))->group)

static PyObject *create(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static const char *const names[NUM_TAKEN] = {
        "group", "executor",   "state",       "jobs",      "acquire", "release",  "queue",     "fail",
        "run_by_mpi", "run_general", "keep_work", "batch", "make_job", "make_call", "add_first", "wake",
        "check_barrier",
    };
    PyObject *objects;
    unsigned long long whole_bytes, kept_elements;
    long long comm;
    if (keywords != NULL && PyDict_Size(keywords) > 0) {
        PyErr_SetString(PyExc_TypeError, "PlainCalls takes no keyword arguments");
        return NULL;
    }
    PlainCalls *self = (PlainCalls *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    int is_taken = PyArg_ParseTuple(args, "O!iiKKLpp", &PyDict_Type, &objects, &self->rank, &self->size, &whole_bytes,
                                    &kept_elements, &comm, &self->reduces_in_place, &self->has_threads);
    for (int i = 0; i < NUM_TAKEN && is_taken; i++)
        is_taken = mpicomm_take(objects, names[i], MEMBERS(self) + i) == 0;
    if (!is_taken) {
        Py_DECREF(self);
        return NULL;
    }
    self->whole_bytes = whole_bytes, self->kept_elements = kept_elements, self->comm = (Handle)comm;
    return (PyObject *)self; /* all sizes take the general path: the smallest sizes are 0 */
}

static int traverse(PyObject *self, visitproc visit, void *arg) {
    return mpicomm_traverse(self, MEMBERS(self), NUM_MEMBERS, visit, arg);
}

static int clear(PyObject *self) { return mpicomm_clear(MEMBERS(self), NUM_MEMBERS); }

static void free_calls(PyObject *self) {
    PyObject_GC_UnTrack(self);
    mpicomm_free(self, MEMBERS(self), NUM_MEMBERS);
}

#define METHOD(NAME, DOC) {#NAME, (PyCFunction)(void (*)(void))NAME, METH_FASTCALL, DOC}

static PyMethodDef calls_methods[] = {
    METHOD(allreduce, "All-reduce one tensor in place."),
    METHOD(reduce, "Reduce one tensor in place on the root."),
    {"reduce_scatter_single", (PyCFunction)(void (*)(void))reduce_scatter, METH_FASTCALL,
     "Reduce a tensor of group size times the output; each rank receives its block."},
    METHOD(broadcast, "Copy the root's tensor to all ranks."),
    METHOD(all_gather_single, "Gather every rank's tensor into one tensor on every rank."),
    METHOD(allgather, "Gather every rank's tensor into a list on every rank."),
    METHOD(gather, "Gather every rank's tensor into a list on the root."),
    METHOD(scatter, "Send one tensor of the root's list to each rank."),
    METHOD(all_to_all_single, "Send each rank its rows of a tensor, in equal parts, and receive rows from all ranks."),
    METHOD(barrier, "Wait for all ranks, for at most the timeout of the options, or of the group."),
    {"close", close_calls, METH_NOARGS, "Refuse calls: the group is destroyed."},
    {"use", use, METH_VARARGS, use_doc},
    {"use_slots", use_slots, METH_VARARGS, use_slots_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot calls_slots[] = {
    {Py_tp_doc, "The collectives of one group on plain tensors.\n\n"
                "Every method takes the arguments of the method of torch's process groups that has its name, and\n"
                "returns the work; or None, without side effects, if the call needs the general path."},
    {Py_tp_new, create},           {Py_tp_methods, calls_methods}, {Py_tp_traverse, traverse}, {Py_tp_clear, clear},
    {Py_tp_dealloc, free_calls},   {0, NULL},
};
static PyType_Spec calls_spec = {"mpicomm.native.hot_path.PlainCalls", sizeof(PlainCalls), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, calls_slots};

int mpicomm_add_plain_calls(PyObject *module) {
    PyObject *type = PyType_FromSpec(&calls_spec);
    CHECK(type != NULL && (queued_call_type = PyType_FromSpec(&queued_spec)) != NULL);
    CHECK(PyModule_AddObjectRef(module, "PlainCalls", type) == 0);
    Py_DECREF(type);
    return 0;
}

/* -- configuration ---------------------------------------------------------------------------------------------- */

int mpicomm_configure_calls(PyObject *objects, PyObject *options, long long sum_op, long long in_place_address) {
    static const Named taken[] = {
        {&sum, "sum"},
        {&average, "average"},
        {&least, "least"},
        {&most, "most"},
        {&callbacks, "callbacks"},
        {&message_threads, "message_threads"},
        {&early_work, "early_work"},
        {&note_writes, "note_writes"},
    };
    static const Named names[] = {
        {&n_async, "asyncOp"}, {&n_reduce_op, "reduceOp"}, {&n_root, "rootRank"},         {&n_shape, "shape"},
        {&n_queue, "queue"},   {&n_call, "call"},          {&n_work, "work"},             {&n_tensors, "tensors"},
        {&n_operation, "_operation"},                      {&n_flushes_denormals, "flushes_denormals"},
    };
    CHECK(TAKE_ALL(objects, taken) == 0 && STORE_NAMES(names) == 0);
    for (size_t i = 0; i < NUM_METHODS; i++) {
        const Named name[] = {{&methods[i].recorded_name, methods[i].recorded}};
        CHECK(STORE_NAMES(name) == 0 && mpicomm_take(options, methods[i].name, &methods[i].options) == 0);
    }
    static Dtype none = {.kind = INT8, .item = 1};
    none.dtype = Py_None, no_dtype = &none;
    mpi_sum = (Handle)sum_op, in_place = (Handle)in_place_address;
    return 0;
}
