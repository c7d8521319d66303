/* The inner loops of the collective operations in shared memory: reductions in rank order, and tensors through slots.

   This file knows neither Python nor torch nor MPI. The extension module calls it (plain_calls.c), and c_library.py by
   ctypes, which releases the GIL. */

#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "slots.h"

/* The loader selects the variant that the processor supports. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=haswell", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

/* The iterations of a loop are independent although its output may be one of its inputs. */
#if defined(__GNUC__) && !defined(__clang__)
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif

#define BLOCK 1024           /* elements reduced at a time; their results stay in the L1 cache */

/* -- numbers ---------------------------------------------------------------------------------------------------- */

static const size_t SIZES[] = {4, 8, 2, 2, 1, 2, 4, 8, 1};

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

/* The output may be one of the terms: a block of it is written when that block of all terms has been added. The result
   is also written to `copy`, unless that is NULL. */
#define DEFINE_SUM(NAME, STORED, WIDE, LOAD, STORE, DIVIDE)                                                            \
    FOR_EACH_PROCESSOR                                                                                                 \
    static void NAME(const void *const *terms, int number, void *out, void *copy, int is_wide, size_t count,           \
                     int divisor) {                                                                                    \
        WIDE sums[BLOCK];                                                                                              \
        for (size_t start = 0; start < count; start += BLOCK) {                                                        \
            size_t length = count - start < BLOCK ? count - start : BLOCK;                                             \
            const STORED *first = (const STORED *)terms[0] + start, *second = (const STORED *)terms[1] + start;        \
            STORED *result = (STORED *)out + start;                                                                    \
            if (number == 2 && divisor == 1 && !is_wide) {                                                             \
                INDEPENDENT                                                                                            \
                for (size_t i = 0; i < length; i++)                                                                    \
                    result[i] = STORE((WIDE)(LOAD(first[i]) + LOAD(second[i])));                                       \
            } else {                                                                                                   \
                for (size_t i = 0; i < length; i++)                                                                    \
                    sums[i] = (WIDE)(LOAD(first[i]) + LOAD(second[i]));                                                \
                for (int rank = 2; rank < number; rank++) {                                                            \
                    const STORED *term = (const STORED *)terms[rank] + start;                                          \
                    for (size_t i = 0; i < length; i++)                                                                \
                        sums[i] = (WIDE)(sums[i] + LOAD(term[i]));                                                     \
                }                                                                                                      \
                if (DIVIDE && divisor != 1) {                                                                          \
                    WIDE by = (WIDE)divisor;                                                                           \
                    for (size_t i = 0; i < length; i++)                                                                \
                        sums[i] = (WIDE)(sums[i] / by);                                                                \
                }                                                                                                      \
                if (is_wide)                                                                                           \
                    memcpy((WIDE *)out + start, sums, length * sizeof(WIDE));                                          \
                else                                                                                                   \
                    for (size_t i = 0; i < length; i++)                                                                \
                        result[i] = STORE(sums[i]);                                                                    \
            }                                                                                                          \
            if (copy != NULL)                                                                                          \
                memcpy((STORED *)copy + start, result, length * sizeof(STORED));                                       \
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
static void add_terms(int kind, const void *const *terms, int number, void *out, void *copy, int is_wide, size_t count,
                      int divisor) {
    static void (*const sums[])(const void *const *, int, void *, void *, int, size_t, int) = {
        sum_float32, sum_float64, sum_bfloat16, sum_float16, sum_int8, sum_int16, sum_int32, sum_int64};
    sums[kind](terms, number, out, copy, is_wide, count, divisor);
}

EXPORTED void mpicomm_sum(int kind, const void *const *terms, int number, void *out, int is_wide, size_t count,
                          int divisor) {
    add_terms(kind, terms, number, out, NULL, is_wide, count, divisor);
}

/* -- extremes --------------------------------------------------------------------------------------------------- */

/* Numbers are compared as signed integers of the same order: of floats, -0 is less than 0, and NaN is at the end that
   wins; the result is then a NaN of the same bits on all ranks. INFINITE: the bits of infinity; 0 for integers. The
   first bit of unsigned integers is inverted. */
#define DEFINE_EXTREME(NAME, BITS, NUMBER, INFINITE, NAN_BITS, FLIPPED)                                                \
    FOR_EACH_PROCESSOR                                                                                                 \
    static void NAME(const void *const *terms, int number, void *out, void *copy, int is_most, size_t count) {         \
        const BITS positive = (BITS)(((BITS)1 << (8 * sizeof(BITS) - 1)) - 1), nans = (BITS)(positive - INFINITE);     \
        const BITS shift = (BITS)(INFINITE == 0 ? 0 : is_most ? 0 - nans : nans);                                      \
        NUMBER keys[BLOCK];                                                                                            \
        for (size_t start = 0; start < count; start += BLOCK) {                                                        \
            size_t length = count - start < BLOCK ? count - start : BLOCK;                                             \
            BITS *result = (BITS *)out + start;                                                                        \
            for (int rank = 0; rank < number; rank++) {                                                                \
                const BITS *term = (const BITS *)terms[rank] + start;                                                  \
                for (size_t i = 0; i < length; i++) {                                                                  \
                    BITS fold = (BITS)(INFINITE == 0 ? FLIPPED : (BITS)((NUMBER)term[i] < 0 ? positive : 0));          \
                    NUMBER key = (NUMBER)(BITS)((BITS)(term[i] ^ fold) + shift), best = rank == 0 ? key : keys[i];     \
                    keys[i] = is_most == (key > best) ? key : best;                                                    \
                }                                                                                                      \
            }                                                                                                          \
            for (size_t i = 0; i < length; i++) {                                                                      \
                BITS bits = (BITS)((BITS)keys[i] - shift);                                                             \
                bits ^= (BITS)(INFINITE == 0 ? FLIPPED : (BITS)((NUMBER)bits < 0 ? positive : 0));                     \
                result[i] = INFINITE != 0 && (bits & positive) > INFINITE ? (BITS)NAN_BITS : bits;                     \
            }                                                                                                          \
            if (copy != NULL)                                                                                          \
                memcpy((BITS *)copy + start, result, length * sizeof(BITS));                                           \
        }                                                                                                              \
    }

DEFINE_EXTREME(extreme_float32, uint32_t, int32_t, 0x7f800000u, 0x7fc00000u, 0)
DEFINE_EXTREME(extreme_float64, uint64_t, int64_t, 0x7ff0000000000000u, 0x7ff8000000000000u, 0)
DEFINE_EXTREME(extreme_bfloat16, uint16_t, int16_t, 0x7f80u, 0x7fc0u, 0)
DEFINE_EXTREME(extreme_float16, uint16_t, int16_t, 0x7c00u, 0x7e00u, 0)
DEFINE_EXTREME(extreme_int8, uint8_t, int8_t, 0, 0, 0)
DEFINE_EXTREME(extreme_int16, uint16_t, int16_t, 0, 0, 0)
DEFINE_EXTREME(extreme_int32, uint32_t, int32_t, 0, 0, 0)
DEFINE_EXTREME(extreme_int64, uint64_t, int64_t, 0, 0, 0)
DEFINE_EXTREME(extreme_uint8, uint8_t, int8_t, 0, 0, 0x80)

/* Keep the least or the largest of `number` terms. */
static void select_terms(int kind, const void *const *terms, int number, void *out, void *copy, int is_most,
                         size_t count) {
    static void (*const extremes[])(const void *const *, int, void *, void *, int, size_t) = {
        extreme_float32, extreme_float64, extreme_bfloat16, extreme_float16, extreme_int8,
        extreme_int16,   extreme_int32,   extreme_int64,    extreme_uint8};
    extremes[kind](terms, number, out, copy, is_most, count);
}

/* -- slots in shared memory -------------------------------------------------------------------------------------- */

typedef enum { ARRIVING, ADDING } Stage;

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

/* Wait until all ranks have stored this step's number in a word of their lines; return whether they have in time. */
static int all_have(const Group *group, size_t word, int64_t limit_ns) {
    int64_t start = 0;
    int turns = 0;
    for (int rank = 0; rank < group->size; rank++) {
        _Atomic uint64_t *flag = (_Atomic uint64_t *)((char *)line_of(group, rank) + word);
        while (atomic_load_explicit(flag, memory_order_acquire) != group->number) {
            if (++turns % 64 == 0 || turns > group->spins) {
                int64_t time = now();
                start = start ? start : time;
                if (time - start > limit_ns)
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

static size_t round_down(size_t value) { return value / 64 * 64; }

/* Whether a reduction leaves its result on this rank. */
static int has_result(const Group *group) { return group->operation == ALL_REDUCE || group->rank == group->root; }

/* Whether the slots of this operation have a region for each rank. */
static int has_regions(const Group *group) {
    return group->operation == REDUCE_SCATTER || group->operation == ALL_TO_ALL || group->operation == SCATTER;
}

/* The size of a slot, or of the region of one rank in it. */
static size_t region_bytes(const Group *group) {
    return has_regions(group) ? round_down(group->slot_bytes / (size_t)group->size) : group->slot_bytes;
}

/* A rank's region in the slot of another rank. */
static char *region_of(const Group *group, int owner, int rank) {
    return slot_of(group, owner) + (has_regions(group) ? region_bytes(group) * (size_t)rank : 0);
}

/* How many numbers of the tensor, or of each block, one step moves. A region of scatter begins with a block's size. */
static size_t step_of(const Group *group) {
    return (region_bytes(group) - (group->operation == SCATTER ? HEADER : 0)) / SIZES[group->kind];
}

/* How many numbers of a tensor or block of `count` numbers the current step moves. */
static size_t length_in(const Group *group, size_t count) {
    return group->start < count ? least(step_of(group), count - group->start) : 0;
}

static size_t length_of(const Group *group) { return length_in(group, group->count); }

/* The block of a rank in the tensor, or the list, that has one for each rank. */
static Block block_of(const Group *group, int rank) {
    char *tensor = group->operation == SCATTER ? (char *)group->source : group->out;
    if (group->is_list)
        return ((const Block *)tensor)[rank];
    uint64_t nbytes = group->count * SIZES[group->kind];
    return (Block){tensor + nbytes * (size_t)rank, nbytes};
}

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
    case BARRIER:
        return;
    case REDUCE_SCATTER:
    case ALL_TO_ALL:
        for (int rank = 0; rank < group->size; rank++)
            if (rank != group->rank)
                memcpy(region_of(group, group->rank, rank), source + group->count * item * (size_t)rank, length * item);
        return;
    case SCATTER:
        for (int rank = 0; group->rank == group->root && rank < group->size; rank++) {
            Block block = block_of(group, rank);
            char *region = region_of(group, group->rank, rank);
            if (rank == group->rank)
                continue;
            memcpy(region, &block.nbytes, sizeof block.nbytes);
            memcpy(region + HEADER, block.address + group->start, length_in(group, block.nbytes));
        }
        return;
    case ALL_GATHER:
        memcpy(slot, source, length * item);
        return;
    case BROADCAST:
    case GATHER:
        if ((group->rank == group->root) == (group->operation == BROADCAST))
            memcpy(slot, source, length * item);
        return;
    default:
        if (is_split(group))
            first = part_of(group, group->rank, &own);
        memcpy(slot, source, first * item);
        memcpy(slot + (first + own) * item, source + (first + own) * item, (length - first - own) * item);
    }
}

/* Bring the contribution to the next step while other ranks add. The buffer is free: all ranks have published the
   current step, for which they had finished reading the other buffer. */
static void bring_next(Group *group) {
    size_t step = step_of(group);
    if (group->start + step >= group->count)
        return;
    group->number++, group->start += step;
    bring(group);
    group->number--, group->start -= step;
    group->has_next = 1;
}

/* Start the current step: bring the contribution, and publish it.

   A rank writes to a buffer again two steps later. By then it has seen that all ranks have published the step between,
   for which they had finished reading this buffer. */
static void start_step(Group *group) {
    group->number++;
    group->stage = ARRIVING;
    if (group->source != NULL && !group->has_next)
        bring(group);
    group->has_next = 0;
    Line *line = line_of(group, group->rank);
    line->signature = group->signature;
    line->nbytes = group->count * SIZES[group->kind];
    line->is_available = group->source != NULL;
    atomic_store_explicit(&line->arrived, group->number, memory_order_release);
}

/* Compare the sizes of the blocks, which may differ, with those of the root. */
static Status compare_blocks(const Group *group) {
    if (group->rank == group->root) {
        for (int rank = 0; rank < group->size; rank++)
            if (block_of(group, rank).nbytes != line_of(group, rank)->nbytes)
                return DIFFERENT;
    } else if (group->operation == SCATTER) {
        uint64_t nbytes;
        memcpy(&nbytes, region_of(group, group->root, group->rank), sizeof nbytes);
        if (nbytes != group->count)
            return DIFFERENT;
    }
    return DONE;
}

/* Compare the calls of all ranks, and find the largest count. */
static Status compare(Group *group) {
    Status status = DONE;
    int may_differ = group->operation == GATHER || group->operation == SCATTER;
    uint64_t nbytes = group->count * SIZES[group->kind], most = nbytes;
    for (int rank = 0; rank < group->size; rank++) {
        const Line *line = line_of(group, rank);
        if (line->signature != group->signature || (!may_differ && line->nbytes != nbytes))
            return DIFFERENT;
        most = line->nbytes > most ? line->nbytes : most;
        if (!line->is_available)
            status = UNAVAILABLE;
    }
    group->most = most / SIZES[group->kind];
    return status == DONE && may_differ ? compare_blocks(group) : status;
}

/* Add or compare `length` numbers of all ranks: this rank's own, and those at an offset in the slots of the others. */
static void add(const Group *group, const char *mine, size_t offset, size_t length, char *out, char *copy) {
    const void *terms[group->size];
    for (int rank = 0; rank < group->size; rank++)
        terms[rank] = rank == group->rank ? mine : slot_of(group, rank) + offset;
    if (group->extreme != NO_EXTREME)
        select_terms(group->kind, terms, group->size, out, copy, group->extreme == MOST, length);
    else
        add_terms(group->kind, terms, group->size, out, copy, group->is_wide, length, group->divisor);
}

/* Compute this rank's results from all slots, or its part of them; return whether the other parts must follow. */
static int fetch(const Group *group) {
    size_t item = SIZES[group->kind], length = length_of(group), offset = group->start * item;
    size_t block = group->count * item, part;
    int is_root = group->rank == group->root;
    const char *mine = group->source + offset;
    char *slot = slot_of(group, group->rank), *out = group->out + offset;
    switch (group->operation) {
    case BARRIER:
        return 0;
    case REDUCE_SCATTER:
        out = group->out + group->start * (group->is_wide ? sizeof(float) : item);
        add(group, mine + block * (size_t)group->rank, region_bytes(group) * (size_t)group->rank, length, out, NULL);
        return 0;
    case ALL_TO_ALL:
        for (int rank = 0; rank < group->size; rank++)
            memcpy(out + block * (size_t)rank,
                   rank == group->rank ? mine + block * (size_t)rank : region_of(group, rank, group->rank),
                   length * item);
        return 0;
    case ALL_GATHER:
    case GATHER:
        if (group->operation == GATHER && !is_root)
            return 0;
        /* This rank's block first: the source may overlap the others. */
        memmove(block_of(group, group->rank).address + offset, mine, length * item);
        for (int rank = 0; rank < group->size; rank++)
            if (rank != group->rank) {
                Block to = block_of(group, rank);
                memcpy(to.address + offset, slot_of(group, rank), length_in(group, to.nbytes));
            }
        return 0;
    case SCATTER:
        if (is_root)
            memmove(out, block_of(group, group->rank).address + offset, length);
        else
            memcpy(out, region_of(group, group->root, group->rank) + HEADER, length);
        return 0;
    case BROADCAST:
        if (!is_root)
            memcpy(out, slot_of(group, group->root), length * item);
        return 0;
    default:
        if (is_split(group)) {
            part = part_of(group, group->rank, &length) * item;
            add(group, mine + part, part, length, slot + part, has_result(group) ? out + part : NULL);
            atomic_store_explicit(&line_of(group, group->rank)->reduced, group->number, memory_order_release);
            return 1;
        }
        if (has_result(group))
            add(group, mine, 0, length, out, NULL);
        return 0;
    }
}

/* Copy the parts that the other ranks have reduced. */
static void fetch_parts(const Group *group) {
    size_t item = SIZES[group->kind], length;
    for (int rank = 0; has_result(group) && rank < group->size; rank++) {
        size_t part = part_of(group, rank, &length) * item;
        if (rank != group->rank)
            memcpy(group->out + group->start * item + part, slot_of(group, rank) + part, length * item);
    }
}

/* Whether all ranks have arrived. The caller of a barrier sleeps between two calls: ranks may be late by minutes. */
static int have_arrived(Group *group, int64_t limit_ns) {
    int have = group->operation == BARRIER && group->has_waited ? mpicomm_all_have_begun(group)
                                                                : all_have(group, offsetof(Line, arrived), limit_ns);
    group->has_waited |= !have;
    return have;
}

/* Run the rest of an operation, as long as no rank is late by more than a limit. */
static Status run_steps(Group *group, int64_t limit_ns) {
    for (;;) {
        if (group->stage == ARRIVING) {
            if (!have_arrived(group, limit_ns))
                return WAITING;
            Status status = compare(group);
            if (status != DONE)
                return status;
            if (fetch(group)) {
                group->stage = ADDING;
                bring_next(group);
            }
        }
        if (group->stage == ADDING) {
            if (!all_have(group, offsetof(Line, reduced), limit_ns))
                return WAITING;
            fetch_parts(group);
        }
        group->start += step_of(group);
        if (group->start >= group->most)
            return DONE;
        start_step(group);
    }
}

EXPORTED int mpicomm_continue(Group *group) { return run_steps(group, group->pause_ns); }

void mpicomm_begin(Group *group, uint64_t call, const void *source, void *out, uint64_t count) {
    group->signature = call & ~((uint64_t)1 << LIST_SHIFT);
    group->operation = call & 0xff, group->kind = call >> KIND_SHIFT & 0xf, group->is_wide = call >> WIDE_SHIFT & 1;
    group->extreme = call >> EXTREME_SHIFT & 3;
    group->root = call >> ROOT_SHIFT & 0xffff, group->divisor = call >> DIVISOR_SHIFT & 0xffff;
    group->is_list = call >> LIST_SHIFT, group->has_next = group->has_waited = 0;
    group->source = source, group->out = out, group->count = count, group->start = 0;
    start_step(group);
}

int mpicomm_has_written(const Group *group) { return group->start > 0 || group->stage != ARRIVING; }

int mpicomm_all_have_begun(const Group *group) {
    for (int rank = 0; rank < group->size; rank++)
        if (atomic_load_explicit(&line_of(group, rank)->arrived, memory_order_acquire) != group->number)
            return 0;
    return 1;
}

int mpicomm_complete_soon(Group *group) {
    Status status = run_steps(group, group->soon_ns);
    group->has_waited = 0;
    return status == DONE;
}

EXPORTED int mpicomm_start(Group *group, uint64_t call, const void *source, void *out, uint64_t count) {
    mpicomm_begin(group, call, source, out, count);
    return mpicomm_continue(group);
}
