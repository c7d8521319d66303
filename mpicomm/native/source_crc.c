#include "slots.h"

/* The CRC of the source files: a library that was built from other sources may have other structures. */
EXPORTED uint32_t mpicomm_source_crc(void) { return SOURCE_CRC; }
