/* The ranks of slots.c as threads of one process, for ThreadSanitizer: ranks_as_threads SIZE CALLS SEED

   All threads make the same calls, in a random order of operations, roots and sizes, each at its own pace, and check
   every result against a formula in rank, size and element. The exit status is 1 after a wrong result. */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "slots.h"

#define SLOT_BYTES 4096
#define SPLIT_BYTES 1024
#define MOST_NUMBERS 5000 /* several steps of a slot, and of a region */
#define MOST_SIZE 8

static int size, calls;
static unsigned seed;
static Line *lines;
static char *slots;

/* One call, as all ranks make it. */
typedef struct {
    Operation operation;
    Kind kind;
    int number, root, count; /* the number of the call; numbers in the tensor, or in the block of rank 0 */
} Call;

static unsigned next(unsigned *state) {
    *state ^= *state << 13, *state ^= *state >> 17, *state ^= *state << 5;
    return *state;
}

static Call choose(unsigned *state, int number) {
    static const int counts[] = {0, 1, 3, 64, 200, 1000, MOST_NUMBERS};
    Call call = {.operation = (Operation)(next(state) % (BARRIER + 1)), .kind = INT8, .number = number};
    if (call.operation == ALL_REDUCE || call.operation == REDUCE || call.operation == REDUCE_SCATTER)
        call.kind = next(state) % 2 ? INT64 : INT16;
    call.root = (int)(next(state) % (unsigned)size);
    call.count = call.operation == BARRIER ? 0 : counts[next(state) % 7];
    return call;
}

/* The number at `index` that a rank contributes to a call; in tensors with blocks, of the block for rank `to`. */
static int value(const Call *call, int rank, int to, int index) { return (rank + 1) * (index % 7) + call->number % 5 + to; }

static int sum(const Call *call, int to, int index) {
    int total = 0;
    for (int rank = 0; rank < size; rank++)
        total += value(call, rank, to, index);
    return total;
}

static void set(const Call *call, void *tensor, int index, int number) {
    if (call->kind == INT64)
        ((int64_t *)tensor)[index] = number;
    else if (call->kind == INT16)
        ((int16_t *)tensor)[index] = (int16_t)number;
    else
        ((int8_t *)tensor)[index] = (int8_t)number;
}

static void check(const Call *call, int rank, const void *tensor, int index, int expected) {
    int64_t found = call->kind == INT64 ? ((const int64_t *)tensor)[index]
                    : call->kind == INT16 ? ((const int16_t *)tensor)[index]
                                          : ((const int8_t *)tensor)[index];
    int64_t wanted = call->kind == INT8 ? (int8_t)expected : expected;
    if (found == wanted)
        return;
    fprintf(stderr, "rank %d, call %d of operation %d: element %d is %ld, expected %ld\n", rank, call->number,
            (int)call->operation, index, (long)found, (long)wanted);
    exit(1);
}

static int has_blocks(const Call *call) {
    return call->operation == REDUCE_SCATTER || call->operation == ALL_TO_ALL || call->operation == SCATTER;
}

static int is_of_lists(const Call *call) { return call->operation == GATHER || call->operation == SCATTER; }

/* Blocks of lists differ in size. */
static int count_of(const Call *call, int rank) { return call->count + (is_of_lists(call) ? 3 * rank : 0); }

static void fill(const Call *call, int rank, int8_t *tensor, size_t item) {
    int blocks = has_blocks(call) ? size : 1;
    size_t start = 0;
    for (int to = 0; to < blocks; to++) {
        int count = call->operation == SCATTER ? count_of(call, to) : count_of(call, rank);
        for (int i = 0; i < count; i++)
            set(call, tensor + start, i, value(call, rank, has_blocks(call) ? to : 0, i));
        start += (size_t)count * item;
    }
}

static void check_results(const Call *call, int rank, const int8_t *tensor, size_t item) {
    int count = count_of(call, rank);
    size_t start = 0;
    switch (call->operation) {
    case ALL_REDUCE:
    case REDUCE:
        for (int i = 0; i < count && (call->operation == ALL_REDUCE || rank == call->root); i++)
            check(call, rank, tensor, i, sum(call, 0, i));
        return;
    case REDUCE_SCATTER:
        for (int i = 0; i < count; i++)
            check(call, rank, tensor, i, sum(call, rank, i));
        return;
    case BROADCAST:
        for (int i = 0; i < count; i++)
            check(call, rank, tensor, i, value(call, call->root, 0, i));
        return;
    case SCATTER:
        for (int i = 0; i < count; i++)
            check(call, rank, tensor, i, value(call, call->root, rank, i));
        return;
    case BARRIER:
        return;
    default: /* ALL_GATHER, ALL_TO_ALL, GATHER */
        for (int from = 0; from < size && (call->operation != GATHER || rank == call->root); from++) {
            int number = call->operation == GATHER ? count_of(call, from) : count;
            for (int i = 0; i < number; i++)
                check(call, rank, tensor + start, i, value(call, from, call->operation == ALL_TO_ALL ? rank : 0, i));
            start += (size_t)number * item;
        }
    }
}

static void *run(void *argument) {
    int rank = (int)(intptr_t)argument;
    size_t most = (size_t)(MOST_NUMBERS + 3 * size) * (size_t)size * sizeof(int64_t);
    int8_t *source = malloc(most), *out = malloc(most);
    unsigned common = seed, own = seed + 977u * (unsigned)(rank + 1);
    Group group = {.lines = lines, .slots = slots, .slot_bytes = SLOT_BYTES, .split_bytes = SPLIT_BYTES,
                   .pause_ns = 100000, .rank = rank, .size = size, .spins = 20};
    for (int number = 0; number < calls; number++) {
        Call call = choose(&common, number);
        size_t item = call.kind == INT64 ? 8 : call.kind == INT16 ? 2 : 1;
        Block blocks[MOST_SIZE];
        size_t start = 0;
        for (int other = 0; other < size; other++) {
            size_t nbytes = (size_t)count_of(&call, other) * item;
            blocks[other] = (Block){(char *)(call.operation == SCATTER ? source : out) + start, nbytes};
            start += nbytes;
        }
        memset(out, 0x55, most < 65536 ? most : 65536);
        fill(&call, rank, source, item);
        int is_in_place = call.operation == ALL_REDUCE || call.operation == REDUCE || call.operation == BROADCAST;
        const void *from = call.operation == SCATTER && rank == call.root ? (void *)blocks : (void *)source;
        void *to = call.operation == GATHER ? (void *)blocks : is_in_place ? source : out;
        uint64_t code = (uint64_t)call.operation | (uint64_t)call.kind << KIND_SHIFT |
                        (uint64_t)call.root << ROOT_SHIFT | (uint64_t)1 << DIVISOR_SHIFT |
                        (uint64_t)is_of_lists(&call) << LIST_SHIFT;
        for (unsigned pause = next(&own) % 8; pause > 5; pause--)
            sched_yield();
        int status = WAITING;
        if (next(&own) % 3 == 0) { /* as an asynchronous call */
            group.soon_ns = next(&own) % 2 ? 50000 : -1;
            mpicomm_begin(&group, code, from, to, (uint64_t)count_of(&call, rank));
            status = mpicomm_complete_soon(&group) ? DONE : WAITING;
        } else {
            status = mpicomm_start(&group, code, from, to, (uint64_t)count_of(&call, rank));
        }
        while (status == WAITING)
            status = mpicomm_continue(&group);
        if (status != DONE) {
            fprintf(stderr, "rank %d, call %d of operation %d: status %d\n", rank, number, (int)call.operation, status);
            exit(1);
        }
        check_results(&call, rank, is_in_place ? source : out, item);
    }
    free(source);
    free(out);
    return NULL;
}

int main(int number, char **arguments) {
    pthread_t threads[MOST_SIZE];
    if (number != 4 || (size = atoi(arguments[1])) < 2 || size > MOST_SIZE) {
        fprintf(stderr, "usage: ranks_as_threads SIZE CALLS SEED, with a size of 2 to %d\n", MOST_SIZE);
        return 2;
    }
    calls = atoi(arguments[2]), seed = (unsigned)atoi(arguments[3]) * 2654435761u + 1;
    lines = aligned_alloc(128, 2 * (size_t)size * sizeof *lines);
    slots = aligned_alloc(64, 2 * (size_t)size * SLOT_BYTES);
    memset(lines, 0, 2 * (size_t)size * sizeof *lines);
    for (int rank = 0; rank < size; rank++)
        pthread_create(&threads[rank], NULL, run, (void *)(intptr_t)rank);
    for (int rank = 0; rank < size; rank++)
        pthread_join(threads[rank], NULL);
    return 0;
}
