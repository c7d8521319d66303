/* Preloaded before MPICH, it lets MPICH report to be Cray MPICH, on which the choice of the launcher depends. */

#include <string.h>

static const char TEXT[] = "MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)\n";

int MPI_Get_library_version(char *version, int *length)
{
    memcpy(version, TEXT, sizeof TEXT);
    *length = sizeof TEXT - 1;
    return 0;
}
