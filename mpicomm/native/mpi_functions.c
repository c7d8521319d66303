#define _GNU_SOURCE
#include "mpi_functions.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

MPIFunctions mpicomm_mpi;
static PyObject *mpi_exception;

int mpicomm_configure_mpi(const char *path, PyObject *exception) {
    static const struct {
        const char *name;
        size_t place;
    } functions[] = {
        {"MPI_Allreduce", offsetof(MPIFunctions, allreduce)},
        {"MPI_Reduce", offsetof(MPIFunctions, reduce)},
        {"MPI_Reduce_scatter_block", offsetof(MPIFunctions, reduce_scatter_block)},
        {"MPI_Bcast", offsetof(MPIFunctions, bcast)},
        {"MPI_Allgather", offsetof(MPIFunctions, allgather)},
        {"MPI_Alltoall", offsetof(MPIFunctions, alltoall)},
        {"MPI_Isend", offsetof(MPIFunctions, isend)},
        {"MPI_Irecv", offsetof(MPIFunctions, irecv)},
        {"MPI_Test", offsetof(MPIFunctions, test)},
        {"MPI_Wait", offsetof(MPIFunctions, wait)},
        {"MPI_Get_elements", offsetof(MPIFunctions, get_elements)},
    };
    void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *function = library != NULL ? dlsym(library, functions[i].name) : NULL;
        if (function == NULL) {
            PyErr_Format(PyExc_OSError, "%s has no function %s", path, functions[i].name);
            return -1;
        }
        memcpy((char *)&mpicomm_mpi + functions[i].place, &function, sizeof function);
    }
    mpicomm_replace(&mpi_exception, mpicomm_reference(exception));
    return 0;
}

PyObject *mpicomm_mpi_error(int code) { return PyObject_CallFunction(mpi_exception, "i", code); }

int mpicomm_raise_mpi(int code) {
    PyObject *error = mpicomm_mpi_error(code);
    if (error != NULL)
        PyErr_SetObject(mpi_exception, error);
    Py_XDECREF(error);
    return -1;
}
