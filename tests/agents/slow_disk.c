/* Preloaded into a process: makes one folder's disk slow, or silent, as a file says.

   SLOW_DISK_FOLDER: what lies below it is slow.  SLOW_DISK_CONTROL: a file elsewhere with "WHAT SECONDS":
   WHAT is "sync" (fsync and fdatasync) or "all" (also open, write, rename, unlink), SECONDS may be "ever".
   The file is read at each call and while it waits, so a disk can become sound again. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int real_openat(const char *path) { return (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY, 0); }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

/* Seconds that a call of this kind takes now; a huge number for ever. */
static double delay(int sync) {
    const char *control = getenv("SLOW_DISK_CONTROL");
    char text[64] = {0}, what[16] = {0}, seconds[32] = {0};
    int file = control ? real_openat(control) : -1;
    if (file < 0) return 0;
    ssize_t got = read(file, text, sizeof text - 1);
    close(file);
    if (got <= 0 || sscanf(text, "%15s %31s", what, seconds) != 2) return 0;
    if (!sync && strcmp(what, "all") != 0) return 0;
    return strcmp(seconds, "ever") == 0 ? 1e9 : atof(seconds);
}

static void wait_for_disk(int sync) {
    double began = now();
    struct timespec bit = {0, 10000000};
    while (now() - began < delay(sync)) nanosleep(&bit, NULL);
}

static int below(const char *path) {
    const char *folder = getenv("SLOW_DISK_FOLDER");
    return folder && path && strncmp(path, folder, strlen(folder)) == 0;
}

static int of_handle(int handle) {
    char name[64], path[PATH_MAX];
    snprintf(name, sizeof name, "/proc/self/fd/%d", handle);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return below(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int fsync(int handle) { if (of_handle(handle)) wait_for_disk(1); return REAL(fsync)(handle); }
int fdatasync(int handle) { if (of_handle(handle)) wait_for_disk(1); return REAL(fdatasync)(handle); }
ssize_t pwrite64(int handle, const void *data, size_t size, off64_t at) {
    if (of_handle(handle)) wait_for_disk(0);
    return REAL(pwrite64)(handle, data, size, at);
}
ssize_t write(int handle, const void *data, size_t size) {
    if (of_handle(handle)) wait_for_disk(0);
    return REAL(write)(handle, data, size);
}
int rename(const char *from, const char *to) { if (below(to)) wait_for_disk(0); return REAL(rename)(from, to); }
int unlink(const char *path) { if (below(path)) wait_for_disk(0); return REAL(unlink)(path); }
int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, mode_t) : 0;
    va_end(more);
    if (below(path)) wait_for_disk(0);
    return REAL(open64)(path, flags, mode);
}
