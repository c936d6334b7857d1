/* File operations that fail when they are told to, for benchmarks/file_faults.py.
 *
 *     cc -shared -fPIC -O1 -o failing.so failing.c -ldl         LD_PRELOAD=failing.so python ...
 *
 * Operations on paths that begin with a prefix, and on what was opened there, are counted. The one with the number that was
 * asked for fails with the errno that was asked for, and does nothing; a write that fails writes half of its bytes first.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#define MOST 4096
static char prefix[1024] = "";
static char last[64] = "";
static long count = 0, chosen = 0;
static int error = 0;
static unsigned char inside[MOST];

void failing_arm(const char *path, long number, int with) {
    snprintf(prefix, sizeof prefix, "%s", path);
    count = 0, chosen = number, error = with, last[0] = 0;
    memset(inside, 0, sizeof inside);
}
long failing_disarm(void) { chosen = 0, prefix[0] = 0; return count; }
const char *failing_last(void) { return last; }

static int under(const char *path) { return prefix[0] && path && strncmp(path, prefix, strlen(prefix)) == 0; }
static int held(int fd) { return prefix[0] && fd >= 0 && fd < MOST && inside[fd]; }
static int at(int fd, const char *path) { return path && path[0] == '/' ? under(path) : held(fd); }
static void note(int fd, int yes) { if (fd >= 0 && fd < MOST) inside[fd] = yes; }

/* Whether this operation is the one that fails. */
static int fails(int counted, const char *name) {
    if (!counted || ++count != chosen) return 0;
    snprintf(last, sizeof last, "%s", name);
    errno = error;
    return 1;
}
#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, name)

#define OPEN(name)                                                                                   \
    int name(const char *path, int flags, ...) {                                                     \
        va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more);             \
        REAL(int, #name, const char *, int, ...);                                                    \
        if (fails(under(path), "open")) return -1;                                                   \
        int fd = real(path, flags, mode); note(fd, under(path)); return fd;                          \
    }
OPEN(open) OPEN(open64)
#define OPENAT(name)                                                                                 \
    int name(int dir, const char *path, int flags, ...) {                                            \
        va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more);             \
        REAL(int, #name, int, const char *, int, ...);                                               \
        int mine = at(dir, path);                                                                    \
        if (fails(mine, "open")) return -1;                                                          \
        int fd = real(dir, path, flags, mode); note(fd, mine); return fd;                            \
    }
OPENAT(openat) OPENAT(openat64)
int close(int fd) { REAL(int, "close", int); note(fd, 0); return real(fd); }
ssize_t read(int fd, void *data, size_t size) {
    REAL(ssize_t, "read", int, void *, size_t); return fails(held(fd), "read") ? -1 : real(fd, data, size);
}
ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    if (fails(held(fd), "write")) { if (real(fd, data, size / 2)) {} errno = error; return -1; }
    return real(fd, data, size);
}
int fsync(int fd) { REAL(int, "fsync", int); return fails(held(fd), "fsync") ? -1 : real(fd); }
int flock(int fd, int how) { REAL(int, "flock", int, int); return fails(held(fd), "flock") ? -1 : real(fd, how); }
#define TRUNCATE(name) int name(int fd, off_t size) {                                                \
        REAL(int, #name, int, off_t); return fails(held(fd), "truncate") ? -1 : real(fd, size); }
TRUNCATE(ftruncate) TRUNCATE(ftruncate64)
#define PATH(name, what) int name(const char *path) {                                                \
        REAL(int, #name, const char *); return fails(under(path), what) ? -1 : real(path); }
PATH(unlink, "remove") PATH(rmdir, "remove")
int unlinkat(int dir, const char *path, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    return fails(at(dir, path), "remove") ? -1 : real(dir, path, flags);
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t); return fails(under(path), "mkdir") ? -1 : real(path, mode);
}
#define TWO(name, what) int name(const char *from, const char *to) {                                 \
        REAL(int, #name, const char *, const char *); return fails(under(from), what) ? -1 : real(from, to); }
TWO(rename, "rename") TWO(link, "link")
int linkat(int from, const char *a, int to, const char *b, int flags) {
    REAL(int, "linkat", int, const char *, int, const char *, int);
    return fails(at(from, a), "link") ? -1 : real(from, a, to, b, flags);
}
int renameat(int from, const char *a, int to, const char *b) {
    REAL(int, "renameat", int, const char *, int, const char *);
    return fails(at(from, a), "rename") ? -1 : real(from, a, to, b);
}
DIR *opendir(const char *path) {
    REAL(DIR *, "opendir", const char *); return fails(under(path), "list") ? NULL : real(path);
}
#define STAT(name, kind) int name(const char *path, struct kind *found) {                            \
        REAL(int, #name, const char *, struct kind *); return fails(under(path), "stat") ? -1 : real(path, found); }
STAT(stat, stat) STAT(stat64, stat64) STAT(lstat, stat) STAT(lstat64, stat64)
