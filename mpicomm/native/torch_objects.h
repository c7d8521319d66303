/* What the extension module knows of torch: tensors, dtypes and works. */

#ifndef MPICOMM_TORCH_OBJECTS_H
#define MPICOMM_TORCH_OBJECTS_H

#include "extension.h"
#include "mpi_functions.h"

typedef enum { NATIVE, CONVERTED, IMPOSSIBLE } Row; /* how MPI computes a reduction: as it is, or after conversions */


typedef struct {
    PyObject *dtype;
    int kind, compared_kind; /* of the numbers that the slots add, and compare; the latter is -1 if they cannot */
    uint64_t item, code;
    Row sum, average;
    Handle arithmetic, carrier;
} Dtype;

/* A dense tensor on the CPU. */
typedef struct {
    char *address;
    uint64_t count, nbytes;
    const Dtype *dtype;
} Memory;

/* The checks return 1 if a call qualifies, 0 if not, and -1 with an exception. */
#define REQUIRE(check)                                                                                                 \
    do {                                                                                                               \
        int result_ = (check);                                                                                         \
        if (result_ <= 0)                                                                                              \
            return result_;                                                                                            \
    } while (0)

/* Whether a tensor is plain: its elements can be accessed in their order in memory, and it has any. */
int mpicomm_read_tensor(PyObject *tensor, Memory *memory);

/* Return the only element of a list, or NULL. */
PyObject *mpicomm_single(PyObject *list);

/* Return a new list of a tensor. */
PyObject *mpicomm_list(PyObject *tensor);

/* Whether a profiler or a dispatch mode is active. */
int mpicomm_needs_general_path(void);

/* The class of a work that is complete. */
extern PyObject *mpicomm_completed_work;

/* Return a new work of a class, with its tensors. */
PyObject *mpicomm_work(PyObject *type, PyObject *tensors);

/* Add a work to a batch of the executor, if this thread has opened it. */
int mpicomm_add_to_batch(PyObject *batch, PyObject *work);

/* Take the objects of torch, and for each dtype its description. */
int mpicomm_configure_torch(PyObject *objects, PyObject *rows);

#endif
