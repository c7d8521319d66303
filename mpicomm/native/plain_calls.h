/* The collectives of a group on plain tensors. */

#ifndef MPICOMM_PLAIN_CALLS_H
#define MPICOMM_PLAIN_CALLS_H

#include "extension.h"

/* Add the types to the module. */
int mpicomm_add_plain_calls(PyObject *module);

/* Take the objects of torch and of this package that the calls need.

   options: the class of the options of each method */
int mpicomm_configure_calls(PyObject *objects, PyObject *options, long long sum_op, long long in_place_address);

#endif
