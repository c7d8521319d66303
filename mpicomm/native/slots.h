/* The collective operations in shared memory, for the extension and for ctypes (c_library.py). */

#ifndef MPICOMM_SLOTS_H
#define MPICOMM_SLOTS_H

#include <stdatomic.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "mpicomm supports little-endian processors only"
#endif

#define EXPORTED __attribute__((visibility("default")))

#define HEADER 64 /* bytes in a region of scatter before its block: the block's size */

typedef enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16, INT8, INT16, INT32, INT64, UINT8 } Kind; /* as in c_library.py */

typedef enum { NO_EXTREME, LEAST, MOST } Extreme; /* what a reduction keeps: the sum, or a number of one rank */

/* As in c_library.py. */
typedef enum {
    ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, GATHER, SCATTER, BARRIER
} Operation;

typedef enum { DONE, WAITING, DIFFERENT, UNAVAILABLE } Status; /* as in c_library.py */

/* What a rank publishes: a line for each rank and buffer. */
typedef struct {
    _Alignas(128) _Atomic uint64_t arrived; /* the number of the step whose contribution is in the slot */
    uint64_t signature, nbytes, is_available;
    _Alignas(64) _Atomic uint64_t reduced; /* the number of the step of which this rank has reduced its part */
} Line;

/* A tensor of a list; two elements of an array in Python. */
typedef struct {
    char *address;
    uint64_t nbytes;
} Block;

/* The call that all ranks must make, as a number, as in c_library.py; the last bit is the rank's own. */
enum {
    KIND_SHIFT = 8, EXTREME_SHIFT = 12, WIDE_SHIFT = 15, ROOT_SHIFT = 16, DIVISOR_SHIFT = 32, DTYPE_SHIFT = 48,
    LIST_SHIFT = 63
};

/* One rank's view of a group, and its current operation; the ctypes structure SlotState of c_library.py. */
typedef struct {
    Line *lines; /* [2][size] */
    char *slots; /* [2][size][slot_bytes] */
    uint64_t slot_bytes;
    uint64_t split_bytes; /* from this size on, each rank reduces a part of an all_reduce or reduce */
    int64_t pause_ns;     /* how long a wait may last until it returns to the caller */
    int64_t soon_ns;      /* the same of an asynchronous call before it returns */
    int32_t rank, size, spins;
    int32_t operation, kind, root, divisor, stage;
    int32_t extreme;    /* of a reduction */
    int32_t is_wide;    /* whether reduce_scatter leaves its sums of narrow floats in float32 */
    int32_t is_list;    /* whether the tensor with a block for each rank is a list of blocks */
    int32_t has_next;   /* whether the contribution to the next step is in its slot already */
    int32_t has_waited; /* whether the operation has returned WAITING */
    uint64_t signature; /* of the current operation */
    uint64_t number;    /* of the current step: an operation has a step for each slot that its tensor fills */
    uint64_t count;     /* numbers in the whole tensor, or in one block if a tensor has a block for each rank */
    uint64_t most;      /* the largest count of all ranks: in gather and scatter, blocks may differ in size */
    uint64_t start;     /* of the current step, in the tensor or in each block */
    const char *source;
    char *out;
} Group;

/* Start an operation, and finish it unless other ranks are late.

   call: the operation, the kind of number, the extreme, whether sums stay wide, the root, the divisor, the dtype, and
   whether the blocks are a list
   source: this rank's contribution, for scatter that of the root; NULL if the library cannot read it
   out: this rank's result
   count: numbers in the whole tensor, or in this rank's block if a tensor has a block for each rank */
EXPORTED int mpicomm_start(Group *group, uint64_t call, const void *source, void *out, uint64_t count);

/* Continue the current operation; WAITING means that other ranks are late and the caller must call this again. */
EXPORTED int mpicomm_continue(Group *group);

/* The first part of mpicomm_start, which waits for nobody; mpicomm_continue must follow. */
void mpicomm_begin(Group *group, uint64_t call, const void *source, void *out, uint64_t count);

/* Whether the current operation may have written a part of its result. */
int mpicomm_has_written(const Group *group);

/* Whether all ranks have begun the current step. */
int mpicomm_all_have_begun(const Group *group);

/* Complete an operation if the other ranks are never later than `soon_ns` and make the same call; return whether it has
   completed. Otherwise mpicomm_continue must follow. */
int mpicomm_complete_soon(Group *group);

#endif
