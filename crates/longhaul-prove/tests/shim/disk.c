/*
 * A bad disk, loaded by LD_PRELOAD into processes that use a store. It acts on the files of one folder only:
 *
 *   - full: what makes a file longer (or everything) is answered with ENOSPC, sometimes after a short write;
 *   - fsync fails: EIO; as on Linux, what was written before it is then lost for good although it can still be
 *     read, and everyone else who has the file open is told too, once;
 *   - power loss: each change since the last fsync of its file is noted with the bytes before and after it, so that
 *     `src/disk.rs` can put back, after all processes were killed, what a disk might have been left with;
 *   - the process is killed in the middle of its n-th write.
 *
 * LONGHAUL_DISK_FOLDER is the folder, LONGHAUL_DISK_STATE another one: in it is `control`, sixteen 64-bit numbers that
 * the driver writes (first half) and this counts up (second half), and `NAME.undo` for each file, if LONGHAUL_DISK_UNDO
 * is set. Those have a head of five numbers and then records of six, each with the bytes before and after.
 *
 * All numbers are little-endian, as the host is. What a `-shm` file has is not durable, and never noted.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FULL, SYNC_FAILS, DIE_AT, NO_SPACE = 8, SHORT, FAILED_SYNCS, WRITES, SYNCS, NUMBERS = 16 };
enum { NOT_FULL, FULL_FOR_MORE, FULL_FOR_ALL };
enum { SYNC_FAILS_ALWAYS = 1, SYNC_FAILS_ONCE };
enum { WRITE = 1, TRUNCATE, CREATE, UNLINK };
enum { PENDING, DURABLE, LOST };

/* The head of NAME.undo. Records begin after it; `settled` is before every record that is still pending. */
struct head {
    uint64_t generation, end, settled, errors, unused;
};

struct record {
    uint64_t kind, fate, offset, old_length, new_length, old_size;
};

enum kind { UNKNOWN, OTHER, OURS, SHARED_MEMORY, THE_FOLDER };

/* What is known of a descriptor: of which file it is, and which failed fsync of that was told to it. */
struct known {
    enum kind kind;
    uint64_t errors;
    char name[64];
};

#define MOST 4096
static struct known fds[MOST];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char folder[PATH_MAX], state[PATH_MAX];
static size_t folder_length;
static volatile uint64_t *control;
static int lock_fd = -1;
static int undo;

static int (*real_open)(const char *, int, ...);
static int (*real_openat)(int, const char *, int, ...);
static int (*real_close)(int);
static ssize_t (*real_write)(int, const void *, size_t);
static ssize_t (*real_pwrite)(int, const void *, size_t, off_t);
static ssize_t (*real_writev)(int, const struct iovec *, int);
static ssize_t (*real_pwritev)(int, const struct iovec *, int, off_t);
static int (*real_ftruncate)(int, off_t);
static int (*real_fallocate)(int, int, off_t, off_t);
static int (*real_posix_fallocate)(int, off_t, off_t);
static int (*real_fsync)(int);
static int (*real_fdatasync)(int);
static int (*real_unlink)(const char *);
static int (*real_dup2)(int, int);
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void broken(const char *what) {
    dprintf(2, "disk.c: %s: %s\n", what, strerror(errno));
    abort();
}

static void prepare(void) {
    real_open = dlsym(RTLD_NEXT, "open");
    real_openat = dlsym(RTLD_NEXT, "openat");
    real_close = dlsym(RTLD_NEXT, "close");
    real_write = dlsym(RTLD_NEXT, "write");
    real_pwrite = dlsym(RTLD_NEXT, "pwrite");
    real_writev = dlsym(RTLD_NEXT, "writev");
    real_pwritev = dlsym(RTLD_NEXT, "pwritev");
    real_ftruncate = dlsym(RTLD_NEXT, "ftruncate");
    real_fallocate = dlsym(RTLD_NEXT, "fallocate");
    real_posix_fallocate = dlsym(RTLD_NEXT, "posix_fallocate");
    real_fsync = dlsym(RTLD_NEXT, "fsync");
    real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
    real_unlink = dlsym(RTLD_NEXT, "unlink");
    real_dup2 = dlsym(RTLD_NEXT, "dup2");
    const char *in = getenv("LONGHAUL_DISK_FOLDER"), *with = getenv("LONGHAUL_DISK_STATE");
    if (!in || !with) return;
    char path[PATH_MAX + 16];
    snprintf(folder, sizeof folder, "%s", in);
    snprintf(state, sizeof state, "%s", with);
    folder_length = strlen(folder);
    undo = getenv("LONGHAUL_DISK_UNDO") != NULL;
    snprintf(path, sizeof path, "%s/control", state);
    int fd = real_open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) broken("there is no control file");
    control = mmap(NULL, NUMBERS * sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (control == MAP_FAILED) broken("mmap");
    real_close(fd);
}

static int on(void) {
    pthread_once(&once, prepare);
    return control != NULL;
}

static void count(int what) {
    __atomic_fetch_add(&control[what], 1, __ATOMIC_SEQ_CST);
}

/* The name of a file in the folder; of one further below, its path from there. */
static const char *name_in_folder(const char *path) {
    if (strncmp(path, folder, folder_length) != 0 || path[folder_length] != '/') return NULL;
    return path + folder_length + 1;
}

static int ends_with(const char *name, const char *end) {
    size_t length = strlen(name), tail = strlen(end);
    return length >= tail && strcmp(name + length - tail, end) == 0;
}

/* Locks out the other threads and processes. A process that is killed lets go of it. */
static void lock(void) {
    pthread_mutex_lock(&mutex);
    if (!undo) return;
    if (lock_fd < 0) {
        char path[PATH_MAX + 16];
        snprintf(path, sizeof path, "%s/lock", state);
        lock_fd = real_open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (lock_fd < 0) broken("the lock");
    }
    while (flock(lock_fd, LOCK_EX) != 0)
        if (errno != EINTR) broken("flock");
}

static void unlock(void) {
    int kept = errno;
    if (undo) flock(lock_fd, LOCK_UN);
    pthread_mutex_unlock(&mutex);
    errno = kept;
}

/* The notes about a file, open; with the lock. */
static int notes_of(const char *name, struct head *head) {
    char path[PATH_MAX + 128];
    snprintf(path, sizeof path, "%s/%s.undo", state, name);
    int fd = real_open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) broken(path);
    if (pread(fd, head, sizeof *head, 0) != sizeof *head) {
        memset(head, 0, sizeof *head);
        head->end = head->settled = sizeof *head;
    }
    return fd;
}

static void save_head(int notes, const struct head *head) {
    if (real_pwrite(notes, head, sizeof *head, 0) != sizeof *head) broken("notes");
}

/* Notes a change before it is made. The head says last that it is there, so a kill leaves no half of one. */
static void note(const char *name, struct record record, const void *before, const void *after) {
    struct head head;
    int notes = notes_of(name, &head);
    struct iovec parts[3] = {{&record, sizeof record},
                             {(void *)before, record.old_length},
                             {(void *)after, record.new_length}};
    ssize_t length = sizeof record + record.old_length + record.new_length;
    if (real_pwritev(notes, parts, 3, head.end) != length) broken("notes");
    head.end += length;
    save_head(notes, &head);
    real_close(notes);
}

/* What the pending records before `until` come to. */
static void settle(int notes, struct head *head, uint64_t until, int names, uint64_t fate) {
    uint64_t at = head->settled, open = 0;
    struct record record;
    while (at < head->end) {
        if (pread(notes, &record, sizeof record, at) != sizeof record) broken("notes");
        int is_name = record.kind == CREATE || record.kind == UNLINK;
        if (record.fate == PENDING && at < until && is_name == names) {
            record.fate = fate;
            if (real_pwrite(notes, &record, sizeof record, at) != sizeof record) broken("notes");
        }
        if (record.fate == PENDING && !open) open = at;
        at += sizeof record + record.old_length + record.new_length;
    }
    head->settled = open ? open : head->end;
}

/* Forgets everything if everything is durable: what is on the disk is what can be read. */
static void forget(int notes, struct head *head) {
    if (head->settled != head->end || head->end == sizeof *head) return;
    uint64_t at = sizeof *head;
    struct record record;
    while (at < head->end) {
        if (pread(notes, &record, sizeof record, at) != sizeof record) broken("notes");
        if (record.fate != DURABLE) return;
        at += sizeof record + record.old_length + record.new_length;
    }
    head->generation++;
    head->end = head->settled = sizeof *head;
    /* First the head: whoever is killed in between leaves some bytes behind the end, and not an end behind the bytes. */
    save_head(notes, head);
    if (real_ftruncate(notes, sizeof *head) != 0) broken("notes");
}

static struct known *look(int fd) {
    static struct known none = {.kind = OTHER};
    if (!on() || fd < 0 || fd >= MOST) return &none;
    struct known *known = &fds[fd];
    if (known->kind != UNKNOWN) return known;
    int kept = errno;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    enum kind kind = OTHER;
    if (length > 0) {
        path[length] = 0;
        const char *name = name_in_folder(path);
        if (strcmp(path, folder) == 0) {
            kind = THE_FOLDER;
        } else if (name && ends_with(name, "-shm")) {
            kind = SHARED_MEMORY;
        } else if (name) {
            kind = OURS;
            if (undo) {
                struct head head;
                if (strlen(name) >= sizeof known->name) broken("a name is too long");
                memcpy(known->name, name, strlen(name) + 1);
                lock();
                real_close(notes_of(name, &head));
                unlock();
                known->errors = head.errors;
            }
        }
    }
    known->kind = kind;
    errno = kept;
    return known;
}

static void look_anew(int fd) {
    if (fd >= 0 && fd < MOST) fds[fd].kind = UNKNOWN;
}

static int noted(const struct known *known) {
    return undo && known->kind == OURS;
}

/* How many bytes of a write fit on the disk; -1: none, ENOSPC. */
static ssize_t room(const struct known *known, int fd, off_t offset, size_t length) {
    if (known->kind != OURS && known->kind != SHARED_MEMORY) return length;
    uint64_t full = control[FULL];
    if (full == NOT_FULL || length == 0) return length;
    if (full == FULL_FOR_MORE) {
        struct stat stat;
        if (fstat(fd, &stat) != 0 || offset + (off_t)length <= stat.st_size) return length;
        ssize_t fits = offset < stat.st_size ? stat.st_size - offset : 0;
        if (fits > 0) {
            count(SHORT);
            return fits;
        }
    } else if (length > 512 && __atomic_load_n(&control[NO_SPACE], __ATOMIC_SEQ_CST) % 3 == 0) {
        /* A part is taken, and nothing after it. */
        count(SHORT);
        count(NO_SPACE);
        return length / 2;
    }
    count(NO_SPACE);
    errno = ENOSPC;
    return -1;
}

static ssize_t write_at(struct known *known, int fd, const char *bytes, size_t length, off_t offset, int seek) {
    ssize_t fits = room(known, fd, offset, length);
    if (fits < 0) return -1;
    length = fits;
    if (known->kind == OURS) {
        uint64_t number = __atomic_add_fetch(&control[WRITES], 1, __ATOMIC_SEQ_CST);
        if (control[DIE_AT] && number == control[DIE_AT]) {
            if (noted(known)) length /= 2;
        } else {
            number = 0;
        }
        if (noted(known)) {
            char *before = malloc(length ? length : 1);
            if (!before) broken("malloc");
            lock();
            struct stat stat;
            if (fstat(fd, &stat) != 0) broken("fstat");
            ssize_t old = pread(fd, before, length, offset);
            if (old < 0) broken("pread");
            struct record record = {WRITE, PENDING, offset, old, length, stat.st_size};
            note(known->name, record, before, bytes);
            ssize_t written = real_pwrite(fd, bytes, length, offset);
            unlock();
            free(before);
            if (number) kill(getpid(), SIGKILL);
            if (seek && written > 0) lseek(fd, offset + written, SEEK_SET);
            return written;
        }
        if (number) kill(getpid(), SIGKILL);
    }
    return seek ? real_write(fd, bytes, length) : real_pwrite(fd, bytes, length, offset);
}

ssize_t pwrite(int fd, const void *bytes, size_t length, off_t offset) {
    struct known *known = look(fd);
    if (known->kind == OTHER) return real_pwrite(fd, bytes, length, offset);
    return write_at(known, fd, bytes, length, offset, 0);
}

ssize_t pwrite64(int fd, const void *bytes, size_t length, off_t offset) {
    return pwrite(fd, bytes, length, offset);
}

ssize_t write(int fd, const void *bytes, size_t length) {
    struct known *known = look(fd);
    if (known->kind == OTHER) return real_write(fd, bytes, length);
    int appends = fcntl(fd, F_GETFL) & O_APPEND;
    off_t offset = lseek(fd, 0, appends ? SEEK_END : SEEK_CUR);
    return write_at(known, fd, bytes, length, offset, 1);
}

/* Written piece by piece where it matters: to take less than was asked for is a write's good right. */
static ssize_t write_parts(int fd, const struct iovec *parts, int number, off_t offset, int seek) {
    ssize_t sum = 0;
    for (int part = 0; part < number; part++) {
        ssize_t written = seek ? write(fd, parts[part].iov_base, parts[part].iov_len)
                               : pwrite(fd, parts[part].iov_base, parts[part].iov_len, offset + sum);
        if (written < 0) return sum ? sum : -1;
        sum += written;
        if ((size_t)written < parts[part].iov_len) break;
    }
    return sum;
}

ssize_t writev(int fd, const struct iovec *parts, int number) {
    if (look(fd)->kind == OTHER) return real_writev(fd, parts, number);
    return write_parts(fd, parts, number, 0, 1);
}

ssize_t pwritev(int fd, const struct iovec *parts, int number, off_t offset) {
    if (look(fd)->kind == OTHER) return real_pwritev(fd, parts, number, offset);
    return write_parts(fd, parts, number, offset, 0);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int number, off_t offset) {
    return pwritev(fd, parts, number, offset);
}

int ftruncate(int fd, off_t length) {
    struct known *known = look(fd);
    struct stat stat;
    if (known->kind == OTHER || fstat(fd, &stat) != 0) return real_ftruncate(fd, length);
    if (length > stat.st_size && room(known, fd, stat.st_size, length - stat.st_size) < 0) return -1;
    if (!noted(known)) return real_ftruncate(fd, length);
    lock();
    if (fstat(fd, &stat) != 0) broken("fstat");
    size_t cut = length < stat.st_size ? stat.st_size - length : 0;
    char *before = malloc(cut ? cut : 1);
    if (!before || pread(fd, before, cut, length) != (ssize_t)cut) broken("what is cut off");
    struct record record = {TRUNCATE, PENDING, length, cut, 0, stat.st_size};
    note(known->name, record, before, NULL);
    int answer = real_ftruncate(fd, length);
    unlock();
    free(before);
    return answer;
}

int ftruncate64(int fd, off_t length) {
    return ftruncate(fd, length);
}

int fallocate(int fd, int mode, off_t offset, off_t length) {
    struct known *known = look(fd);
    if (known->kind == OTHER) return real_fallocate(fd, mode, offset, length);
    if (noted(known)) {
        errno = EOPNOTSUPP;
        return -1;
    }
    return room(known, fd, offset, length) < length ? (errno = ENOSPC, -1) : real_fallocate(fd, mode, offset, length);
}

int fallocate64(int fd, int mode, off_t offset, off_t length) {
    return fallocate(fd, mode, offset, length);
}

int posix_fallocate(int fd, off_t offset, off_t length) {
    struct known *known = look(fd);
    if (known->kind == OTHER) return real_posix_fallocate(fd, offset, length);
    if (noted(known)) return EOPNOTSUPP;
    return room(known, fd, offset, length) < length ? ENOSPC : real_posix_fallocate(fd, offset, length);
}

int posix_fallocate64(int fd, off_t offset, off_t length) {
    return posix_fallocate(fd, offset, length);
}

/* Whether this fsync is to fail. */
static int fails(void) {
    uint64_t how = control[SYNC_FAILS];
    if (how != SYNC_FAILS_ONCE) return how != 0;
    return __atomic_compare_exchange_n(&control[SYNC_FAILS], &how, 0, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* The names of the folder's files are durable. */
static void names_are_durable(void) {
    lock();
    DIR *notes = opendir(state);
    if (!notes) broken(state);
    struct dirent *entry;
    while ((entry = readdir(notes))) {
        char name[256];
        snprintf(name, sizeof name, "%s", entry->d_name);
        if (!ends_with(name, ".undo")) continue;
        name[strlen(name) - strlen(".undo")] = 0;
        struct head head;
        int fd = notes_of(name, &head);
        settle(fd, &head, head.end, 1, DURABLE);
        forget(fd, &head);
        save_head(fd, &head);
        real_close(fd);
    }
    closedir(notes);
    unlock();
}

static int sync_with(int (*real)(int), int fd) {
    struct known *known = look(fd);
    if (known->kind == OTHER || known->kind == SHARED_MEMORY) return real(fd);
    count(SYNCS);
    int failed = fails();
    if (!undo) {
        if (!failed) return real(fd);
        count(FAILED_SYNCS);
        errno = EIO;
        return -1;
    }
    if (known->kind == THE_FOLDER) {
        if (!failed && real(fd) == 0) {
            names_are_durable();
            return 0;
        }
        count(FAILED_SYNCS);
        errno = EIO;
        return -1;
    }
    struct head head;
    lock();
    int notes = notes_of(known->name, &head);
    uint64_t until = head.end, generation = head.generation;
    if (failed) {
        settle(notes, &head, until, 0, LOST);
        head.errors++;
        save_head(notes, &head);
    }
    int told = head.errors != known->errors;
    known->errors = head.errors;
    real_close(notes);
    unlock();
    if (told) {
        count(FAILED_SYNCS);
        errno = EIO;
        return -1;
    }
    /* What others write meanwhile is not part of it. */
    if (real(fd) != 0) return -1;
    lock();
    notes = notes_of(known->name, &head);
    if (head.errors != known->errors) {
        /* Another one's failed while this was under way: what this was to make durable may be lost. */
        known->errors = head.errors;
        real_close(notes);
        unlock();
        count(FAILED_SYNCS);
        errno = EIO;
        return -1;
    }
    if (head.generation == generation) {
        settle(notes, &head, until, 0, DURABLE);
        forget(notes, &head);
        save_head(notes, &head);
    }
    real_close(notes);
    unlock();
    return 0;
}

int fsync(int fd) {
    on();
    return sync_with(real_fsync, fd);
}

int fdatasync(int fd) {
    on();
    return sync_with(real_fdatasync, fd);
}

/* The name of a file whose making and removing is noted. */
static const char *noted_name(const char *path) {
    const char *name = on() && undo ? name_in_folder(path) : NULL;
    return name && !ends_with(name, "-shm") ? name : NULL;
}

static int open_with(const char *path, int flags, mode_t mode) {
    const char *name = flags & O_CREAT ? noted_name(path) : NULL;
    if (!name) return real_open(path, flags, mode);
    lock();
    if (access(path, F_OK) != 0) {
        struct record record = {CREATE, PENDING, 0, 0, 0, 0};
        note(name, record, NULL, NULL);
    }
    int fd = real_open(path, flags, mode);
    unlock();
    return fd;
}

int open(const char *path, int flags, ...) {
    on();
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) {
        va_list more;
        va_start(more, flags);
        mode = va_arg(more, mode_t);
        va_end(more);
    }
    /* What is written over has to be read. */
    if (control && undo && name_in_folder(path) && (flags & O_ACCMODE) == O_WRONLY) flags += O_RDWR - O_WRONLY;
    int fd = open_with(path, flags, mode);
    look_anew(fd);
    if (fd >= 0 && control && name_in_folder(path)) look(fd);
    return fd;
}

int open64(const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) {
        va_list more;
        va_start(more, flags);
        mode = va_arg(more, mode_t);
        va_end(more);
    }
    return open(path, flags, mode);
}

int openat(int at, const char *path, int flags, ...) {
    on();
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) {
        va_list more;
        va_start(more, flags);
        mode = va_arg(more, mode_t);
        va_end(more);
    }
    if (path[0] == '/' || at == AT_FDCWD) return open(path, flags, mode);
    int fd = real_openat(at, path, flags, mode);
    look_anew(fd);
    return fd;
}

int openat64(int at, const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) {
        va_list more;
        va_start(more, flags);
        mode = va_arg(more, mode_t);
        va_end(more);
    }
    return openat(at, path, flags, mode);
}

int close(int fd) {
    on();
    look_anew(fd);
    return real_close(fd);
}

int dup2(int from, int to) {
    on();
    int fd = real_dup2(from, to);
    look_anew(fd);
    return fd;
}

int unlink(const char *path) {
    on();
    const char *name = noted_name(path);
    if (!name) return real_unlink(path);
    lock();
    struct stat stat;
    /* Another descriptor is opened and closed here, which drops this process's locks on the file: one that is removed
     * (a log, a journal) has none. */
    int fd = real_open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &stat) == 0) {
        char *before = malloc(stat.st_size ? stat.st_size : 1);
        if (!before || pread(fd, before, stat.st_size, 0) != stat.st_size) broken("what is removed");
        struct record record = {UNLINK, PENDING, 0, stat.st_size, 0, stat.st_size};
        note(name, record, before, NULL);
        free(before);
    }
    if (fd >= 0) real_close(fd);
    int answer = real_unlink(path);
    unlock();
    return answer;
}
