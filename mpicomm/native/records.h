/* The records of the flight recorder, as the hot path writes them. */

#ifndef MPICOMM_RECORDS_H
#define MPICOMM_RECORDS_H

#include "extension.h"

/* One call of an operation: the base of flight_recorder.Operation, which documents the fields. */
typedef struct {
    PyObject_HEAD
    PyObject *code, *instruction, *group, *is_message, *sequence, *name, *dtype, *count, *peer;
    PyObject *number, *called_at, *start, *end, *limit_or_options, *usual_limit, *tag, *message;
} CallRecord;

/* The state of a group: the base of flight_recorder.Group. */
typedef struct {
    PyObject_HEAD
    PyObject *sequence, *running, *broken, *timeout;
} GroupRecord;

/* Whether a group is neither broken nor destroyed; -1 with an exception.

   state: its group_state.GroupState */
int mpicomm_is_usable(const GroupRecord *group, PyObject *state);

/* Add the types to the module. */
int mpicomm_add_record_types(PyObject *module);

/* Take the objects of flight_recorder that a record needs, from a dict. */
int mpicomm_configure_recorder(PyObject *objects);

/* Create the record of a collective, whose call site is the caller of the running Python function. This may run code in
   Python; the other functions do not.

   kind: a small number of the operation, for the cache of call sites
   peer: the root, or None
   options: torch's options of the call, with its timeout

   Returns a new reference; NULL with an exception. */
CallRecord *mpicomm_create_record(GroupRecord *group, int kind, PyObject *name, PyObject *dtype, uint64_t count,
                                  PyObject *peer, PyObject *options);

/* Number the collective in its group, and record that it runs since its call. */
int mpicomm_start_record(CallRecord *record);

/* Record that the collective, which keeps its number, continues later. */
void mpicomm_postpone_record(CallRecord *record);

/* Record a message that nobody waits for yet; returns the same.

   message_numbers: the counters of the group's messages, by name, peer and tag */
CallRecord *mpicomm_record_message(GroupRecord *group, int kind, PyObject *name, PyObject *dtype, uint64_t count,
                                   PyObject *peer, PyObject *tag, PyObject *message_numbers);

/* Record that a call waits for the message. */
int mpicomm_begin_wait(CallRecord *record);

/* Record that the operation has completed. */
int mpicomm_end_record(CallRecord *record);

#endif
