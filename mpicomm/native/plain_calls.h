/* The collectives of a group on plain tensors. */

#ifndef MPICOMM_PLAIN_CALLS_H
#define MPICOMM_PLAIN_CALLS_H

#include "extension.h"

/* Add the types to the module. */
int mpicomm_add_plain_calls(PyObject *module);

/* Take the objects of torch, mpi4py and this package that the calls need.

   rows: for each dtype, its description
   options: the class of the options of each method
   mpi: the path of mpi4py's extension module, through which MPI's functions are found */
int mpicomm_configure_calls(PyObject *objects, PyObject *rows, PyObject *options, const char *mpi, long long sum_op,
                            long long in_place_address);

#endif
