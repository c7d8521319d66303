/* Reports the signal that ends this process (SIGSEGV, SIGABRT, ...) over the sockets of the watchdog.

   The handler runs in a broken process: it calls async-signal-safe functions only, and its buffers are static, since
   the alternate stack is small. `mpicomm.watchdog.signals` prepares what it needs. */

#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

#define MAX_SIGNALS 65
#define MAX_SOCKETS 65536    /* higher descriptors get no message; the limit of open files is rarely higher */
#define MAX_HEAD 256         /* bytes of a message before the line of Python */
#define MAX_LINE 512         /* bytes of the line */
#define REPORT_NS 200000000  /* time for the other ranks to report the signal */
#define LENGTH 4             /* bytes of the length before each message, as in connection.py */

static struct sigaction previous[MAX_SIGNALS];
static char heads[MAX_SIGNALS][MAX_HEAD];
static atomic_uchar is_connected[MAX_SOCKETS];
static pid_t owner;
static int output = -1;      /* stderr */
static int stacks = -1;      /* the file into which faulthandler writes; -1 if it writes to stderr itself */

static char text[1 << 18];   /* the stacks of some hundred threads */
static char message[LENGTH + MAX_HEAD + 2 * MAX_LINE + 2];

/* Write the message: its head, and the first line of the stack of the thread that crashed, escaped for JSON. */
static size_t write_message(int number, size_t length) {
    const char mark[] = "Current thread ", file[] = "\n  File ";
    char *to = stpcpy(message + LENGTH, heads[number]);
    const char *end = text + length, *line = memmem(text, length, mark, sizeof mark - 1);
    line = line == NULL ? NULL : memchr(line, '\n', (size_t)(end - line));
    if (line != NULL && (size_t)(end - line) > sizeof file && memcmp(line, file, sizeof file - 1) == 0) {
        line += 3;
        for (const char *last = line + MAX_LINE; line < end && line < last && *line != '\n'; line++) {
            if (*line == '"' || *line == '\\')
                *to++ = '\\';
            *to++ = *line < ' ' || *line > '~' ? '?' : *line;
        }
    }
    *to++ = '"';
    *to++ = '}';
    size_t size = (size_t)(to - message);
    for (int each = 0; each < LENGTH; each++)
        message[each] = (char)((size - LENGTH) >> 8 * (LENGTH - 1 - each));
    return size;
}

/* Send the message, and return whether a socket has accepted it. */
static int send_message(size_t size) {
    int has_sent = 0;
    for (int fd = 0; fd < MAX_SOCKETS; fd++)
        if (is_connected[fd])
            has_sent |= send(fd, message, size, MSG_DONTWAIT | MSG_NOSIGNAL) > 0;
    return has_sent;
}

/* Print the stacks, of which the first `length` bytes have been read. */
static void print_stacks(ssize_t length) {
    for (off_t offset = 0; length > 0; length = pread(stacks, text, sizeof text, offset)) {
        for (ssize_t done = 0; done < length;) {
            ssize_t written = write(output, text + done, (size_t)(length - done));
            if (written < 0 && errno != EINTR)
                return;
            done += written < 0 ? 0 : written;
        }
        offset += length;
        if ((size_t)length < sizeof text)
            return;
    }
}

static void on_crash(int number) {
    static atomic_flag is_reporting = ATOMIC_FLAG_INIT;
    int error = errno;
    sigaction(number, &previous[number], NULL);
    if (atomic_flag_test_and_set(&is_reporting)) {
        nanosleep(&(struct timespec){.tv_sec = 1}, NULL);  /* another thread reports its crash, and ends the process */
    } else {
        ssize_t length = stacks < 0 ? 0 : pread(stacks, text, sizeof text, 0);
        size_t size = write_message(number, length < 0 ? 0 : (size_t)length);
        int has_sent = getpid() == owner && send_message(size);  /* a forked child has the sockets of the rank */
        print_stacks(length);  /* after that: the output may block */
        if (has_sent)  /* let the other ranks report it: some launchers kill them as soon as this process has ended */
            nanosleep(&(struct timespec){.tv_nsec = REPORT_NS}, NULL);
        if (stacks >= 0 && ftruncate(stacks, 0) == 0)
            lseek(stacks, 0, SEEK_SET);  /* forked children share the file */
    }
    errno = error;
    raise(number);
}

/* Catch a signal, whose message begins with `head` and ends with the line of Python, a quotation mark and a brace. */
EXPORTED int mpicomm_catch(int number, const char *head) {
    struct sigaction action = {.sa_handler = on_crash, .sa_flags = SA_NODEFER | SA_ONSTACK};
    sigemptyset(&action.sa_mask);
    if (strlen(head) >= MAX_HEAD)
        return -1;
    strcpy(heads[number], head);
    return sigaction(number, &action, &previous[number]);
}

/* Print the stacks that faulthandler has written into a file. */
EXPORTED void mpicomm_print_stacks(int from, int to) {
    stacks = from;
    output = to;
}

/* Send the message of this process over a socket, or no longer. */
EXPORTED void mpicomm_set_connected(int fd, int connected) {
    owner = getpid();
    if (fd >= 0 && fd < MAX_SOCKETS)
        is_connected[fd] = (unsigned char)connected;
}
