/* The inner loops of the collective operations in shared memory: sums in rank order, and tensors through slots.

   The library knows neither Python nor torch nor MPI. native.py calls it by ctypes, which releases the GIL. Without it,
   Python computes the same bits. */

#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define EXPORTED __attribute__((visibility("default")))

/* The loader selects the variant that the processor supports. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=haswell", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#define MAX_RANKS 256
#define BLOCK 1024           /* elements added at a time; their sums stay in the L1 cache */

/* -- numbers ---------------------------------------------------------------------------------------------------- */

typedef enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16, INT8, INT16, INT32, INT64 } Kind; /* as in native.py */

static const size_t SIZES[] = {4, 8, 2, 2, 1, 2, 4, 8};

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float same(float value) { return value; }
static inline double same_double(double value) { return value; }

static inline float from_bfloat16(uint16_t bits) { return from_bits((uint32_t)bits << 16); }

/* To nearest, ties to even; adding to the bits carries into the exponent, at last into infinity. */
static inline uint16_t to_bfloat16(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
}

static inline float from_float16(uint16_t half) {
    uint32_t magnitude = half & 0x7fff;
    /* From an integer, not from a denormal float32, which a thread may treat as zero. */
    uint32_t denormal = bits_of((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t normal = (magnitude << 13) + (112u << 23) + (magnitude >= 0x7c00 ? 112u << 23 : 0);
    return from_bits((magnitude < 0x400 ? denormal : normal) | (uint32_t)(half & 0x8000) << 16);
}

static inline uint16_t to_float16(float value) {
    uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
    /* 0.5 has the unit of denormal float16 numbers in its last place: the addition rounds to it. */
    uint32_t denormal = bits_of(from_bits(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    uint32_t large = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    uint32_t rounded = magnitude < 0x38800000 ? denormal : magnitude >= 0x47800000 ? large : normal;
    return (uint16_t)(rounded | (bits >> 16 & 0x8000));
}

/* -- sums ------------------------------------------------------------------------------------------------------- */

/* The output may be one of the terms: a block of it is written when that block of all terms has been added. */
#define DEFINE_SUM(NAME, STORED, WIDE, LOAD, STORE, DIVIDE)                                                            \
    FOR_EACH_PROCESSOR                                                                                                 \
    static void NAME(const void *const *terms, int number, void *out, int is_wide, size_t count, int divisor) {        \
        WIDE sums[BLOCK];                                                                                              \
        for (size_t start = 0; start < count; start += BLOCK) {                                                        \
            size_t length = count - start < BLOCK ? count - start : BLOCK;                                             \
            const STORED *first = (const STORED *)terms[0] + start, *second = (const STORED *)terms[1] + start;        \
            for (size_t i = 0; i < length; i++)                                                                        \
                sums[i] = (WIDE)(LOAD(first[i]) + LOAD(second[i]));                                                    \
            for (int rank = 2; rank < number; rank++) {                                                                \
                const STORED *term = (const STORED *)terms[rank] + start;                                              \
                for (size_t i = 0; i < length; i++)                                                                    \
                    sums[i] = (WIDE)(sums[i] + LOAD(term[i]));                                                         \
            }                                                                                                          \
            if (DIVIDE && divisor != 1) {                                                                              \
                WIDE by = (WIDE)divisor;                                                                               \
                for (size_t i = 0; i < length; i++)                                                                    \
                    sums[i] = (WIDE)(sums[i] / by);                                                                    \
            }                                                                                                          \
            if (is_wide) {                                                                                             \
                memcpy((WIDE *)out + start, sums, length * sizeof(WIDE));                                              \
            } else {                                                                                                   \
                STORED *result = (STORED *)out + start;                                                                \
                for (size_t i = 0; i < length; i++)                                                                    \
                    result[i] = STORE(sums[i]);                                                                        \
            }                                                                                                          \
        }                                                                                                              \
    }

DEFINE_SUM(sum_float32, float, float, same, same, 1)
DEFINE_SUM(sum_float64, double, double, same_double, same_double, 1)
DEFINE_SUM(sum_bfloat16, uint16_t, float, from_bfloat16, to_bfloat16, 1)
DEFINE_SUM(sum_float16, uint16_t, float, from_float16, to_float16, 1)
DEFINE_SUM(sum_int8, uint8_t, uint8_t, , , 0) /* unsigned numbers wrap around, with the bits of signed ones */
DEFINE_SUM(sum_int16, uint16_t, uint16_t, , , 0)
DEFINE_SUM(sum_int32, uint32_t, uint32_t, , , 0)
DEFINE_SUM(sum_int64, uint64_t, uint64_t, , , 0)

/* Add `number` terms, at least two, in their order; divide the sum; round it once, unless the output is wide. */
EXPORTED void mpicomm_sum(int kind, const void *const *terms, int number, void *out, int is_wide, size_t count,
                          int divisor) {
    static void (*const sums[])(const void *const *, int, void *, int, size_t, int) = {
        sum_float32, sum_float64, sum_bfloat16, sum_float16, sum_int8, sum_int16, sum_int32, sum_int64};
    sums[kind](terms, number, out, is_wide, count, divisor);
}

/* -- slots in shared memory -------------------------------------------------------------------------------------- */

/* What a rank publishes: a line for each rank and buffer. */
typedef struct {
    _Alignas(128) _Atomic uint64_t arrived; /* the number of the step whose contribution is in the slot */
    uint64_t signature, nbytes, is_available;
    _Alignas(64) _Atomic uint64_t reduced; /* the number of the step of which this rank has reduced its part */
} Line;

typedef enum { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST } Operation; /* as in native.py */

typedef enum { DONE, WAITING, DIFFERENT, UNAVAILABLE } Status; /* as in native.py */

typedef enum { ARRIVING, ADDING } Stage;

/* One rank's view of a group, and its current operation; the ctypes structure SlotState of native.py. */
typedef struct {
    Line *lines; /* [2][size] */
    char *slots; /* [2][size][slot_bytes] */
    uint64_t slot_bytes;
    uint64_t split_bytes; /* from this size on, each rank reduces a part of an all_reduce or reduce */
    int64_t pause_ns;     /* how long a wait may last until it returns to the caller */
    int32_t rank, size, spins;
    int32_t operation, kind, root, divisor, stage;
    uint64_t number; /* of the current step: an operation has a step for each slot that its tensor fills */
    uint64_t count;  /* numbers in the whole tensor, or in one block of those of reduce_scatter and all_gather */
    uint64_t start;  /* of the current step, in the tensor or in each block */
    const char *source;
    char *out;
} Group;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static size_t least(size_t first, size_t second) { return first < second ? first : second; }

static Line *line_of(const Group *group, int rank) {
    return group->lines + (group->number % 2) * (size_t)group->size + (size_t)rank;
}

static char *slot_of(const Group *group, int rank) {
    return group->slots + ((group->number % 2) * (size_t)group->size + (size_t)rank) * group->slot_bytes;
}

/* Wait until all ranks have stored this step's number in a word of their lines; return whether they have. */
static int all_have(const Group *group, size_t word) {
    int64_t start = 0;
    int turns = 0;
    for (int rank = 0; rank < group->size; rank++) {
        _Atomic uint64_t *flag = (_Atomic uint64_t *)((char *)line_of(group, rank) + word);
        while (atomic_load_explicit(flag, memory_order_acquire) != group->number) {
            if (++turns % 64 == 0 || turns > group->spins) {
                int64_t time = now();
                start = start ? start : time;
                if (time - start > group->pause_ns)
                    return 0;
            }
            if (turns > group->spins)
                sched_yield();
            else
                relax();
        }
    }
    return 1;
}

/* How many numbers of the tensor, or of each block, one step moves. */
static size_t step_of(const Group *group) {
    size_t numbers = group->slot_bytes / SIZES[group->kind];
    return group->operation == REDUCE_SCATTER ? numbers / (size_t)group->size : numbers;
}

static size_t length_of(const Group *group) { return least(step_of(group), group->count - group->start); }

/* The part of a step that a rank reduces: parts begin at multiples of 64 bytes. */
static size_t part_of(const Group *group, int rank, size_t *length) {
    size_t count = length_of(group), unit = 64 / SIZES[group->kind];
    size_t each = (count + (size_t)group->size - 1) / (size_t)group->size;
    each = (each + unit - 1) / unit * unit;
    size_t start = least(each * (size_t)rank, count);
    *length = least(each, count - start);
    return start;
}

static int is_split(const Group *group) { return group->count * SIZES[group->kind] >= group->split_bytes; }

/* Copy this rank's contribution, as far as other ranks read it, to its slot. */
static void bring(const Group *group) {
    size_t item = SIZES[group->kind], length = length_of(group), first = 0, own = 0;
    const char *source = group->source + group->start * item;
    char *slot = slot_of(group, group->rank);
    switch (group->operation) {
    case REDUCE_SCATTER:
        for (int rank = 0; rank < group->size; rank++)
            if (rank != group->rank)
                memcpy(slot + step_of(group) * item * (size_t)rank, source + group->count * item * (size_t)rank,
                       length * item);
        return;
    case BROADCAST:
        if (group->rank == group->root)
            memcpy(slot, source, length * item);
        return;
    case ALL_GATHER:
        memcpy(slot, source, length * item);
        return;
    default:
        if (is_split(group))
            first = part_of(group, group->rank, &own);
        memcpy(slot, source, first * item);
        memcpy(slot + (first + own) * item, source + (first + own) * item, (length - first - own) * item);
    }
}

/* Start the current step: bring the contribution, and publish it.

   A rank writes to a buffer again two steps later. By then it has seen that all ranks have published the step between,
   for which they had finished reading this buffer. */
static void start_step(Group *group) {
    group->number++;
    group->stage = ARRIVING;
    if (group->source != NULL)
        bring(group);
    Line *line = line_of(group, group->rank);
    line->signature = (uint64_t)group->operation | (uint64_t)group->kind << 8 | (uint64_t)(group->divisor != 1) << 16 |
                      (uint64_t)group->root << 32;
    line->nbytes = group->count * SIZES[group->kind];
    line->is_available = group->source != NULL;
    atomic_store_explicit(&line->arrived, group->number, memory_order_release);
}

static Status compare(const Group *group) {
    Status status = DONE;
    const Line *mine = line_of(group, group->rank);
    for (int rank = 0; rank < group->size; rank++) {
        const Line *line = line_of(group, rank);
        if (line->signature != mine->signature || line->nbytes != mine->nbytes)
            return DIFFERENT;
        if (!line->is_available)
            status = UNAVAILABLE;
    }
    return status;
}

/* Add `length` numbers of all ranks: this rank's own, and those at an offset in the slots of the others. */
static void add(const Group *group, const char *mine, size_t offset, size_t length, char *out) {
    const void *terms[MAX_RANKS];
    for (int rank = 0; rank < group->size; rank++)
        terms[rank] = rank == group->rank ? mine : slot_of(group, rank) + offset;
    mpicomm_sum(group->kind, terms, group->size, out, 0, length, group->divisor);
}

/* Compute this rank's results from all slots, or its part of them; return whether the other parts must follow. */
static int fetch(const Group *group) {
    size_t item = SIZES[group->kind], length = length_of(group), offset = group->start * item;
    size_t block = group->count * item, part;
    char *slot = slot_of(group, group->rank), *out = group->out + offset;
    switch (group->operation) {
    case REDUCE_SCATTER:
        add(group, group->source + block * (size_t)group->rank + offset, step_of(group) * item * (size_t)group->rank,
            length, out);
        return 0;
    case ALL_GATHER:
        for (int rank = 0; rank < group->size; rank++) {
            const char *from = rank == group->rank ? group->source + offset : slot_of(group, rank);
            if (from != out + block * (size_t)rank) /* the source may be this rank's block of the output */
                memcpy(out + block * (size_t)rank, from, length * item);
        }
        return 0;
    case BROADCAST:
        if (group->rank != group->root)
            memcpy(out, slot_of(group, group->root), length * item);
        return 0;
    default:
        if (is_split(group)) {
            part = part_of(group, group->rank, &length) * item;
            add(group, group->source + offset + part, part, length, slot + part);
            atomic_store_explicit(&line_of(group, group->rank)->reduced, group->number, memory_order_release);
            return 1;
        }
        if (group->operation == ALL_REDUCE || group->rank == group->root)
            add(group, group->source + offset, 0, length, out);
        return 0;
    }
}

/* Copy the parts that the ranks have reduced. */
static void fetch_parts(const Group *group) {
    size_t item = SIZES[group->kind], length;
    if (group->operation == REDUCE && group->rank != group->root)
        return;
    for (int rank = 0; rank < group->size; rank++) {
        size_t part = part_of(group, rank, &length) * item;
        memcpy(group->out + group->start * item + part, slot_of(group, rank) + part, length * item);
    }
}

/* Continue the current operation; WAITING means that other ranks are late and the caller must call this again. */
EXPORTED int mpicomm_continue(Group *group) {
    for (;;) {
        if (group->stage == ARRIVING) {
            if (!all_have(group, offsetof(Line, arrived)))
                return WAITING;
            Status status = compare(group);
            if (status != DONE)
                return status;
            group->stage = fetch(group) ? ADDING : ARRIVING;
        }
        if (group->stage == ADDING) {
            if (!all_have(group, offsetof(Line, reduced)))
                return WAITING;
            fetch_parts(group);
        }
        group->start += length_of(group);
        if (group->start >= group->count)
            return DONE;
        start_step(group);
    }
}

/* Start an operation, and finish it unless other ranks are late.

   count: numbers in the whole tensor, or in one block of reduce_scatter's input and all_gather's output
   source: this rank's contribution, for all_gather its block; NULL if the library cannot read it
   out: for all_gather and reduce, the whole tensor; for reduce_scatter, this rank's block */
EXPORTED int mpicomm_start(Group *group, int operation, int kind, int root, int divisor, const void *source, void *out,
                           uint64_t count) {
    group->operation = operation, group->kind = kind, group->root = root, group->divisor = divisor;
    group->source = source, group->out = out, group->count = count, group->start = 0;
    start_step(group);
    return mpicomm_continue(group);
}

/* The CRC of this file: a library that was built from another source may have other structures. */
EXPORTED uint32_t mpicomm_source_crc(void) { return SOURCE_CRC; }
