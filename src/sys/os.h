/* SPDX-License-Identifier: MIT */
#ifndef SYS_OS_H
#define SYS_OS_H
/*
 * Every system call of the engine, each asking the fault hook first. Functions return a value
 * >= 0 or a negative errno; none retries, none prints.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>

/*
 * Files. Paths that do not begin with a slash start at the directory `from`; AT_FDCWD is where the
 * process is.
 *
 * No descriptor gets the numbers 0, 1 and 2: where a program runs with these closed, what somebody
 * prints would end up in the file. os_above_standard() does that for descriptors made elsewhere;
 * the one it is given is closed if that fails.
 */
int os_above_standard(int fd);
int os_open(int from, const char *path, int flags, mode_t mode);
int os_open_unnamed(int directory, mode_t mode);	/* O_TMPFILE, to read and write */
int os_reopen(int fd, int flags);	/* the same file; needs /proc */
int os_duplicate(int fd);
int os_close(int fd);
ssize_t os_pread(int fd, void *buffer, size_t length, uint64_t offset);
ssize_t os_pwrite(int fd, const void *buffer, size_t length, uint64_t offset);
int os_fstat(int fd, struct stat *st);
int os_stat(int from, const char *path, struct stat *st);
int os_lstat(int from, const char *path, struct stat *st);
int os_fallocate(int fd, uint64_t size);
int os_truncate(int fd, uint64_t size);
int os_fdatasync(int fd);
int os_fsync(int fd);
int os_syncfs(int fd);
int os_chmod(int fd, mode_t mode);
int os_chown(int fd, uid_t uid, gid_t gid);
int os_attributes(int fd, char *names, size_t size);	/* flistxattr(2): bytes of names */
int os_attribute(int fd, const char *name, void *value, size_t size);	/* bytes of its value */
int os_set_attribute(int fd, const char *name, const void *value, size_t size);
int os_remove_attribute(int fd, const char *name);
int os_link_fd(int fd, int directory, const char *name);
int os_lock(int fd);			/* for this opening of the file; -EAGAIN: another has it */
int os_unlock(int fd);
int os_entropy(void *bytes, size_t size);	/* chance, a few bytes */
int os_rename(int directory, const char *from, const char *to);
int os_unlink(int directory, const char *name);
int os_mkdir(int from, const char *path, mode_t mode);
int os_rmdir(int from, const char *path);
int os_may_write(int from, const char *path);	/* access(2) */
/* In a sticky directory only owners may; what else it takes is not asked for. */
bool os_may_replace(const struct stat *file, const struct stat *directory);
int os_readlink(int from, const char *path, char *target, size_t size);
int os_end(int fd, uint64_t *size);	/* lseek(2) to the end, for block devices */
/* Every name in a directory but "." and "..", in no order; ends early where each() is not 0. */
int os_list(int from, const char *path, int (*each)(const char *name, void *context),
	    void *context);
/* A small file of the kernel's, with a NUL after it; what does not fit is left out. Without stdio,
 * whose locks a thread must not hold while another one is in exit(). */
int os_read_text(const char *path, char *text, size_t size);
int os_realpath(const char *path, char resolved[4096]);
int os_direct_alignment(int fd, uint32_t *memory, uint32_t *offset);	/* statx; 0s: unknown */
int os_filesystem(int fd, char *name, size_t size);			/* "ext4", "tmpfs", ... */
bool os_filesystem_is_own(const char *name);	/* only this machine writes to such */
int os_uncache(int fd);
int os_random(int fd);	/* no readahead on this descriptor */
/* Have a range in the page cache when it returns, whole huge pages around it where the system has
 * such; a short one, and on old kernels any, is only begun to be read. */
int os_fetch(int fd, uint64_t offset, uint64_t length);
uint64_t os_files_limit(void);	/* descriptors that this process may have */

/* Page-cache residency of a range, in pages. -ENOSYS where the kernel cannot say. */
int os_cachestat(int fd, uint64_t offset, uint64_t length, uint64_t *pages);
int os_mincore(int fd, uint64_t offset, uint64_t length, uint64_t *pages);
/* The same by looking at a few places, any of them, with reads that do not wait; on an os_random()
 * fd. What these fetch is let go again, so the cache stays as it was; that part does wait. */
int os_cached_sample(int fd, uint64_t offset, uint64_t length, uint64_t *pages);

/* Memory. os_map_huge gives zeroed memory aligned to 2 MiB, on huge pages where the system
 * allows, preferring NUMA node `node` (-1: anywhere). What comes from the heap goes to free(). */
void *os_calloc(size_t count, size_t size);
void *os_realloc(void *memory, size_t count, size_t size);
void *os_calloc_aligned(size_t alignment, size_t size);
int os_map_huge(size_t size, int node, void **memory);
int os_map_file(int fd, uint64_t offset, size_t length, void **memory);
int os_unmap(void *memory, size_t size);
void os_not_inherited(void *memory, size_t size);	/* a forked child shall not have it */
size_t os_page_size(void);
uint64_t os_memory_available(void);	/* bytes, with swap; UINT64_MAX where unknown */

/* A counter to poll for, at zero, closed by exec; and adding to it, which cannot fail for us: a
 * count too large for one more is as good as that one more. */
int os_eventfd(void);
void os_eventfd_add(int fd);

/* Threads and time. */
int os_thread_start(pthread_t *thread, void *(*run)(void *), void *argument);
/* One that lives beside the program: from its start on no signal is for it. */
int os_thread_start_aside(pthread_t *thread, void *(*run)(void *), void *argument);
uint64_t os_now(void);			/* monotonic, ns */
uint64_t os_date(void);			/* seconds since 1970, UTC */
int os_host(char *name, size_t size);	/* what this machine calls itself */
uint64_t os_thread_cpu(void);		/* of the calling thread, ns */
uint64_t os_thread_read(void);		/* bytes that stores had to read for it, so far */
void os_sleep(uint64_t ns);
struct timespec os_from_now(double seconds);	/* for pthread_cond_timedwait() */
void os_precise_sleep(void);		/* this thread's sleeps end on time from now on */
void os_stand_back(void);		/* this thread takes only cores that are free */

/*
 * Forks. A child has one thread; a lock that another thread held at that moment would stay held in
 * it for ever. So the locks of the modules are all taken before a fork and let go after it, on
 * both sides, and what they guard is whole in the child.
 *
 * Two rules make that safe: a thread that holds one of them takes only later ones of this list, and
 * nothing that may fork is called with one held (the CUDA driver does fork while it starts).
 */
enum os_fork_place {
	OS_FORK_DEVICES,	/* mem/device.c */
	OS_FORK_CUDA,		/* sys/cuda.c */
	OS_FORK_POOL,		/* mem/pool.c */
	OS_FORK_TUNER,		/* engine/tuner.c */
	OS_FORK_URING,		/* io/queue_uring.c */
	OS_FORK_CUFILE,		/* sys/cufile.c; its lock is held where forks may happen */
	OS_FORK_WARM,		/* engine/warm.c */
	OS_FORK_CHECKPOINTS,	/* format/checkpoint_lock.c */
	OS_FORK_PLACES
};

/* A module's lock, or NULL, and what to do in a child, or NULL; called before main(). */
void os_at_fork(enum os_fork_place place, pthread_mutex_t *lock, void (*in_child)(void));
/* Differs between a process and its forked children; what was made in another is inherited. */
unsigned int os_generation(void);

#endif
