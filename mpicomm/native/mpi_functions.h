/* The functions of the MPI library that mpi4py has loaded, without a header of MPI. */

#ifndef MPICOMM_MPI_FUNCTIONS_H
#define MPICOMM_MPI_FUNCTIONS_H

#include "extension.h"

#include <stdint.h>

/* A handle of MPI: a pointer or an int, which are passed alike in a register or in a word on the stack. */
typedef intptr_t Handle;

typedef struct {
    int (*allreduce)(const void *, void *, intptr_t, Handle, Handle, Handle);
    int (*reduce)(const void *, void *, intptr_t, Handle, Handle, intptr_t, Handle);
    int (*reduce_scatter_block)(const void *, void *, intptr_t, Handle, Handle, Handle);
    int (*bcast)(void *, intptr_t, Handle, intptr_t, Handle);
    int (*allgather)(const void *, intptr_t, Handle, void *, intptr_t, Handle, Handle);
    int (*alltoall)(const void *, intptr_t, Handle, void *, intptr_t, Handle, Handle);
    int (*isend)(const void *, intptr_t, Handle, intptr_t, intptr_t, Handle, Handle *);
    int (*irecv)(void *, intptr_t, Handle, intptr_t, intptr_t, Handle, Handle *);
    int (*test)(Handle *, int *, void *);
    int (*wait)(Handle *, void *);
    int (*get_elements)(const void *, Handle, int *);
} MPIFunctions;

extern MPIFunctions mpicomm_mpi;

/* Find the functions in a loaded library and its dependencies.

   exception: mpi4py's exception, which is made from an error code */
int mpicomm_configure_mpi(const char *path, PyObject *exception);

/* Return mpi4py's exception of an error code. */
PyObject *mpicomm_mpi_error(int code);

/* Set it; return -1. */
int mpicomm_raise_mpi(int code);

#endif
