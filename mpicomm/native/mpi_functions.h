/* The functions of the MPI library that mpi4py has loaded, without a header of MPI. */

#ifndef MPICOMM_MPI_FUNCTIONS_H
#define MPICOMM_MPI_FUNCTIONS_H

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
} MPIFunctions;

extern MPIFunctions mpicomm_mpi;

/* Find the functions in a loaded library and its dependencies; return the name of one that is missing, or NULL. */
const char *mpicomm_find_mpi(const char *path);

#endif
