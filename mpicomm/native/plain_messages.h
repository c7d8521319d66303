/* The messages of a group on plain tensors. */

#ifndef MPICOMM_PLAIN_MESSAGES_H
#define MPICOMM_PLAIN_MESSAGES_H

#include "extension.h"

/* Add the types to the module. */
int mpicomm_add_plain_messages(PyObject *module);

/* Take the objects of this package that messages need. */
int mpicomm_configure_messages(PyObject *objects);

#endif
