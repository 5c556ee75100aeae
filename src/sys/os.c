/* SPDX-License-Identifier: MIT */
/* Every system call of the engine; see os.h. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <linux/mempolicy.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>
#include "base/text.h"
#include "sys/fault.h"
#include "sys/os.h"

#define HUGE_PAGE (2ul << 20)
/* Places looked at to guess how much of a range is cached: at most, and one for so many bytes. */
#define SAMPLES 8u
#define SAMPLE_BYTES (512ul << 10)

int (*sys_fault_hook)(const char *name);

/* Ask the hook; leave the function with the errno it gives. */
#define FAULT(name)                                   \
	do {                                          \
		int fault_code = sys_fault(name);     \
		if (fault_code)                       \
			return -fault_code;           \
	} while (0)

static int result(long rc)
{
	return rc < 0 ? -errno : (int)rc;
}

int os_above_standard(int fd)
{
	int fault, moved;

	if (fd < 0 || fd > STDERR_FILENO)
		return fd;
	fault = sys_fault("fcntl");
	moved = fault ? -fault : result(fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
	close(fd);
	return moved;
}

int os_open(int from, const char *path, int flags, mode_t mode)
{
	FAULT("open");
	return os_above_standard(result(openat(from, path, flags | O_CLOEXEC, mode)));
}

int os_open_unnamed(int directory, mode_t mode)
{
	FAULT("O_TMPFILE");
	return os_above_standard(
		result(openat(directory, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, mode)));
}

int os_reopen(int fd, int flags)
{
	char self[64];

	FAULT("reopen");
	snprintf(self, sizeof(self), "/proc/self/fd/%d", fd);
	return os_above_standard(result(open(self, flags | O_CLOEXEC)));
}

int os_duplicate(int fd)
{
	FAULT("fcntl");
	return result(fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
}

int os_close(int fd)
{
	/* Closed even when the hook says it failed: Linux frees the descriptor either way. */
	int rc = result(close(fd)), fault = sys_fault("close");

	return fault ? -fault : rc;
}

ssize_t os_pread(int fd, void *buffer, size_t length, uint64_t offset)
{
	FAULT("pread");
	ssize_t n = pread(fd, buffer, length, (off_t)offset);
	return n < 0 ? -errno : n;
}

ssize_t os_pwrite(int fd, const void *buffer, size_t length, uint64_t offset)
{
	FAULT("pwrite");
	ssize_t n = pwrite(fd, buffer, length, (off_t)offset);
	return n < 0 ? -errno : n;
}

int os_fstat(int fd, struct stat *st)
{
	FAULT("fstat");
	return result(fstat(fd, st));
}

int os_stat(int from, const char *path, struct stat *st)
{
	FAULT("stat");
	return result(fstatat(from, path, st, 0));
}

int os_lstat(int from, const char *path, struct stat *st)
{
	FAULT("lstat");
	return result(fstatat(from, path, st, AT_SYMLINK_NOFOLLOW));
}

int os_fallocate(int fd, uint64_t size)
{
	FAULT("fallocate");
	return result(fallocate(fd, 0, 0, (off_t)size));
}

int os_truncate(int fd, uint64_t size)
{
	FAULT("ftruncate");
	return result(ftruncate(fd, (off_t)size));
}

int os_fdatasync(int fd)
{
	FAULT("fdatasync");
	return result(fdatasync(fd));
}

int os_fsync(int fd)
{
	FAULT("fsync");
	return result(fsync(fd));
}

int os_syncfs(int fd)
{
	FAULT("syncfs");
	return result(syncfs(fd));
}

int os_chmod(int fd, mode_t mode)
{
	FAULT("fchmod");
	return result(fchmod(fd, mode));
}

int os_chown(int fd, uid_t uid, gid_t gid)
{
	FAULT("fchown");
	return result(fchown(fd, uid, gid));
}

int os_attributes(int fd, char *names, size_t size)
{
	FAULT("flistxattr");
	return result(flistxattr(fd, names, size));
}

int os_attribute(int fd, const char *name, void *value, size_t size)
{
	FAULT("fgetxattr");
	return result(fgetxattr(fd, name, value, size));
}

int os_set_attribute(int fd, const char *name, const void *value, size_t size)
{
	FAULT("fsetxattr");
	return result(fsetxattr(fd, name, value, size, 0));
}

int os_remove_attribute(int fd, const char *name)
{
	FAULT("fremovexattr");
	return result(fremovexattr(fd, name));
}

int os_link_fd(int fd, int directory, const char *name)
{
	char self[64];
	int rc = -sys_fault("linkat");

	/* Not everybody may do it this way, who is told that there is nothing; /proc is the other
	 * way, where it is mounted. */
	if (!rc)
		rc = result(linkat(fd, "", directory, name, AT_EMPTY_PATH));
	if (rc != -ENOENT)
		return rc;
	FAULT("linkat /proc");
	snprintf(self, sizeof(self), "/proc/self/fd/%d", fd);
	return result(linkat(AT_FDCWD, self, directory, name, AT_SYMLINK_FOLLOW));
}

int os_lock(int fd)
{
	FAULT("flock");
	return result(flock(fd, LOCK_EX | LOCK_NB));
}

int os_unlock(int fd)
{
	FAULT("flock");
	return result(flock(fd, LOCK_UN));
}

int os_entropy(void *bytes, size_t size)
{
	ssize_t n;

	FAULT("getrandom");
	n = getrandom(bytes, size, 0);
	return n < 0 ? -errno : (size_t)n < size ? -EAGAIN : 0;
}

int os_rename(int directory, const char *from, const char *to)
{
	FAULT("rename");
	return result(renameat(directory, from, directory, to));
}

int os_unlink(int directory, const char *name)
{
	FAULT("unlink");
	return result(unlinkat(directory, name, 0));
}

int os_mkdir(int from, const char *path, mode_t mode)
{
	FAULT("mkdir");
	return result(mkdirat(from, path, mode));
}

int os_rmdir(int from, const char *path)
{
	FAULT("rmdir");
	return result(unlinkat(from, path, AT_REMOVEDIR));
}

int os_may_write(int from, const char *path)
{
	FAULT("access");
	return result(faccessat(from, path, W_OK, 0));
}

bool os_may_replace(const struct stat *file, const struct stat *directory)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3];

	if (!(directory->st_mode & S_ISVTX) || file->st_uid == geteuid() ||
	    directory->st_uid == geteuid())
		return true;
	/* Whoever cannot be asked for may find out by trying. */
	if (sys_fault("capget") || syscall(SYS_capget, &header, data))
		return true;
	return data[0].effective & 1u << CAP_FOWNER;
}

int os_readlink(int from, const char *path, char *target, size_t size)
{
	ssize_t n;

	FAULT("readlink");
	n = readlinkat(from, path, target, size - 1);
	if (n < 0)
		return -errno;
	target[n] = 0;
	return 0;
}

int os_end(int fd, uint64_t *size)
{
	off_t end;

	FAULT("lseek");
	end = lseek(fd, 0, SEEK_END);
	if (end < 0)
		return -errno;
	*size = (uint64_t)end;
	return 0;
}

int os_read_text(const char *path, char *text, size_t size)
{
	int fd = os_open(AT_FDCWD, path, O_RDONLY, 0);
	size_t length = 0;
	ssize_t n = 1;

	text[0] = 0;
	if (fd < 0)
		return fd;
	while (n > 0 && length < size - 1) {
		n = os_pread(fd, text + length, size - 1 - length, length);
		if (n == -EINTR)
			n = 1;
		else if (n > 0)
			length += (size_t)n;
	}
	text[length] = 0;
	os_close(fd);
	return n < 0 ? (int)n : 0;
}

int os_list(int from, const char *path, int (*each)(const char *name, void *context), void *context)
{
	struct dirent *entry;
	DIR *directory;
	int fd = os_open(from, path, O_RDONLY | O_DIRECTORY, 0), rc = sys_fault("fdopendir");

	if (fd < 0)
		return fd;
	errno = rc;
	directory = rc ? NULL : fdopendir(fd);
	if (!directory) {
		rc = -errno;
		close(fd);
		return rc;
	}
	while (!rc) {
		/* Only errno tells the end from an error. */
		errno = sys_fault("readdir");
		entry = errno ? NULL : readdir(directory);
		if (!entry)
			break;
		if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
			rc = each(entry->d_name, context);
	}
	if (!rc && !entry && errno)
		rc = -errno;
	closedir(directory);
	return rc;
}

int os_realpath(const char *path, char resolved[PATH_MAX])
{
	FAULT("realpath");
	return realpath(path, resolved) ? 0 : -errno;
}

/* The two fields of struct statx that C libraries before 2.37 do not name. */
#define STATX_DIOALIGN_BIT 0x2000u
struct statx_tail {
	uint32_t dio_mem_align, dio_offset_align;
};

int os_direct_alignment(int fd, uint32_t *memory, uint32_t *offset)
{
	/* stx_dio_mem_align sits right behind stx_mnt_id in the kernel's fixed layout. */
	union {
		struct statx known;
		struct {
			unsigned char head[0x98];
			struct statx_tail tail;
		} raw;
	} buffer;

	FAULT("statx");
	memset(&buffer, 0, sizeof(buffer));
	*memory = *offset = 0;
	if (statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS | STATX_DIOALIGN_BIT, &buffer.known) < 0)
		return -errno;
	if (!(buffer.known.stx_mask & STATX_DIOALIGN_BIT))
		return -ENOSYS;
	*memory = buffer.raw.tail.dio_mem_align;
	*offset = buffer.raw.tail.dio_offset_align;
	return 0;
}

int os_filesystem(int fd, char *name, size_t size)
{
	static const struct {
		unsigned long magic;
		const char *name;
	} known[] = {
		{ 0xEF53, "ext4" },
		{ 0x58465342, "xfs" },
		{ 0x9123683E, "btrfs" },
		{ 0x01021994, "tmpfs" },
		{ 0x858458f6, "ramfs" },
		{ 0x794c7630, "overlayfs" },
		{ 0x6969, "nfs" },
		{ 0xFF534D42, "cifs" },
		{ 0xFE534D42, "smb2" },
		{ 0x65735546, "fuse" },
		{ 0x0BD00BD0, "lustre" },
		{ 0x47504653, "gpfs" },
		{ 0x00C36400, "ceph" },
		{ 0x2FC12FC1, "zfs" },
		{ 0xF2F52010, "f2fs" },
		{ 0xCA451A4E, "bcachefs" },
		{ 0x01021997, "9p" },
		{ 0x6a656a63, "virtiofs" },
		{ 0x19830326, "beegfs" },
		{ 0x73717368, "squashfs" },
		{ 0x9fa0, "proc" },
		{ 0x62646576, "block device" },
	};
	struct statfs fs;

	FAULT("fstatfs");
	if (fstatfs(fd, &fs) < 0)
		return -errno;
	for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
		if (known[i].magic == ((unsigned long)fs.f_type & 0xffffffff)) {
			text_copy(name, size, known[i].name);
			return 0;
		}
	snprintf(name, size, "0x%lx", (unsigned long)fs.f_type & 0xffffffff);
	return 0;
}

bool os_filesystem_is_own(const char *name)
{
	static const char *const own[] = { "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "overlayfs",
					   "zfs", "f2fs", "bcachefs" };

	for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++)
		if (!strcmp(name, own[i]))
			return true;
	return false;
}

int os_uncache(int fd)
{
	FAULT("fadvise");
	return -posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
}

int os_random(int fd)
{
	FAULT("fadvise");
	return -posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
}

/* Linux 5.14; older kernels answer EINVAL. */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

/* Asked for more at a time, the kernel may take only the beginning: as much as the disk takes in
 * one request or, if that is more, as it reads ahead, which is this much where nobody set it. */
#define WILLNEED_STEP (128ul << 10)

static int will_need(int fd, uint64_t offset, uint64_t length)
{
	uint64_t end = offset + length, next;
	int rc = 0;

	for (; !rc && offset < end; offset = next) {
		FAULT("fadvise");
		next = (offset / WILLNEED_STEP + 1) * WILLNEED_STEP;
		if (next > end)
			next = end;
		rc = -posix_fadvise(fd, (off_t)offset, (off_t)(next - offset),
				    POSIX_FADV_WILLNEED);
	}
	return rc;
}

/*
 * The kernel fetches for a mapping that wishes for huge pages 2 MiB at a time, as one piece of
 * memory: that costs far less CPU time than any other way into the page cache, and what is
 * there in large pieces is copied and registered faster later on.
 */
int os_fetch(int fd, uint64_t offset, uint64_t length)
{
	uint64_t page = os_page_size(), start = offset / page * page;
	size_t size = (size_t)(offset + length - start);
	void *map;
	int rc;

	FAULT("fetch");
	/* For a few pages that would be too much. */
	if (length < HUGE_PAGE / 2)
		return will_need(fd, offset, length);
	map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, (off_t)start);
	if (map == MAP_FAILED)
		return will_need(fd, offset, length);
	/* Nobody would ever unmap it in a child that is forked meanwhile. */
	madvise(map, size, MADV_DONTFORK);
	madvise(map, size, MADV_HUGEPAGE);
	rc = -sys_fault("populate");
	if (!rc)
		rc = result(madvise(map, size, MADV_POPULATE_READ));
	munmap(map, size);
	return rc == -EINVAL ? will_need(fd, offset, length) : rc;
}

#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif

int os_cachestat(int fd, uint64_t offset, uint64_t length, uint64_t *pages)
{
	struct {
		uint64_t offset, length;
	} range = { offset, length };
	struct {
		uint64_t cached, dirty, writeback, evicted, recently_evicted;
	} stat;

	FAULT("cachestat");
	if (syscall(SYS_cachestat, fd, &range, &stat, 0) < 0)
		return -errno;
	*pages = stat.cached;
	return 0;
}

int os_mincore(int fd, uint64_t offset, uint64_t length, uint64_t *pages)
{
	size_t page = os_page_size();
	uint64_t start = offset / page * page;
	size_t size = (size_t)(offset + length - start);
	unsigned char present[4096];
	unsigned char *map;
	int rc = 0;

	FAULT("mincore");
	map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, (off_t)start);
	if (map == MAP_FAILED)
		return -errno;
	*pages = 0;
	for (size_t at = 0; at < size && !rc; at += sizeof(present) * page) {
		size_t part =
			size - at < sizeof(present) * page ? size - at : sizeof(present) * page;

		if (mincore(map + at, part, present) < 0)
			rc = -errno;
		else
			for (size_t i = 0; i < (part + page - 1) / page; i++)
				*pages += present[i] & 1;
	}
	munmap(map, size);
	return rc;
}

/*
 * Even a read that must not wait makes the kernel fetch the page that it missed. Wait for it and
 * let it go again: a look must not change what the next one sees. (One thing cannot be helped: a
 * page where somebody's read-ahead stopped sets that going again.)
 */
static void forget_page(int fd, uint64_t at)
{
	uint64_t page = os_page_size();
	char byte;

	if (os_pread(fd, &byte, 1, at) == 1)
		posix_fadvise(fd, (off_t)(at / page * page), (off_t)page, POSIX_FADV_DONTNEED);
}

uint64_t os_thread_read(void)
{
	struct rusage usage;

	/* In sectors of 512 bytes, whatever the store has. */
	return getrusage(RUSAGE_THREAD, &usage) ? 0 : (uint64_t)usage.ru_inblock * 512;
}

/* Any number below `limit`; another one each time. */
static uint64_t any_below(uint64_t limit)
{
	uint64_t bits = os_now() * 0x9e3779b97f4a7c15u;

	return (bits ^ bits >> 32) % limit;
}

int os_cached_sample(int fd, uint64_t offset, uint64_t length, uint64_t *pages)
{
	uint64_t count = length / SAMPLE_BYTES, step, missed[SAMPLES], misses = 0;
	uint64_t before = os_thread_read();

	FAULT("preadv2");
	count = count < 1 ? 1 : count < SAMPLES ? count : SAMPLES;
	step = length / count;
	for (uint64_t i = 0; i < count; i++) {
		/* Not the same places each time: one of them may have stayed after all. */
		uint64_t at = offset + i * step + any_below(step);
		char byte;
		struct iovec iov = { &byte, 1 };
		ssize_t n = preadv2(fd, &iov, 1, (off_t)at, RWF_NOWAIT);

		if (n < 0 && errno != EAGAIN)
			return -errno;
		/* From a fast store a page may be there before the read gives up on it. */
		if (n <= 0 || before != os_thread_read())
			missed[misses++] = at;
		before = os_thread_read();
	}
	/* All of them are on their way by now, so this takes as long as one. */
	for (uint64_t i = 0; i < misses; i++)
		forget_page(fd, missed[i]);
	*pages = (count - misses) * (length / os_page_size() + 1) / count;
	return 0;
}

void *os_calloc(size_t count, size_t size)
{
	return sys_fault("malloc") ? NULL : calloc(count, size);
}

void *os_realloc(void *memory, size_t count, size_t size)
{
	return sys_fault("malloc") ? NULL : reallocarray(memory, count, size);
}

void *os_calloc_aligned(size_t alignment, size_t size)
{
	void *memory;

	if (sys_fault("malloc"))
		return NULL;
	memory = aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
	return memory ? memset(memory, 0, size) : NULL;
}

int os_map_huge(size_t size, int node, void **memory)
{
	unsigned char *map, *aligned;
	size_t room;

	FAULT("mmap");
	/* Whole pages, so that what is cut off below starts at one. */
	size = (size + os_page_size() - 1) / os_page_size() * os_page_size();
	room = size + HUGE_PAGE;
	map = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
		   -1, 0);
	if (map == MAP_FAILED)
		return -errno;
	aligned = (unsigned char *)(((uintptr_t)map + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
	if (aligned > map)
		munmap(map, (size_t)(aligned - map));
	if (map + room > aligned + size)
		munmap(aligned + size, (size_t)(map + room - (aligned + size)));
	/* Advice, both: the memory works without huge pages and on another node, only slower. */
	madvise(aligned, size, MADV_HUGEPAGE);
	if (node >= 0 && node < 64) {
		unsigned long mask = 1ul << node;
		syscall(SYS_mbind, aligned, size, MPOL_PREFERRED, &mask, 65ul, 0);
	}
	*memory = aligned;
	return 0;
}

int os_map_file(int fd, uint64_t offset, size_t length, void **memory)
{
	FAULT("mmap");
	void *map = mmap(NULL, length, PROT_READ, MAP_SHARED, fd, (off_t)offset);
	if (map == MAP_FAILED)
		return -errno;
	*memory = map;
	return 0;
}

int os_unmap(void *memory, size_t size)
{
	return result(munmap(memory, size));
}

void os_not_inherited(void *memory, size_t size)
{
	/* Without it a write after the fork may move a page away from under the device's copies. */
	madvise(memory, size, MADV_DONTFORK);
}

size_t os_page_size(void)
{
	return (size_t)sysconf(_SC_PAGESIZE);
}

uint64_t os_memory_available(void)
{
	unsigned long long available = 0, swap = 0;
	FILE *file = fopen("/proc/meminfo", "re");
	char line[128];

	while (file && fgets(line, sizeof(line), file)) {
		sscanf(line, "MemAvailable: %llu", &available);
		sscanf(line, "SwapFree: %llu", &swap);
	}
	if (file)
		fclose(file);
	return available ? (available + swap) << 10 : UINT64_MAX;
}

uint64_t os_files_limit(void)
{
	struct rlimit limit;

	return getrlimit(RLIMIT_NOFILE, &limit) ? 0 : limit.rlim_cur;
}

int os_eventfd(void)
{
	FAULT("eventfd");
	return os_above_standard(result(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)));
}

void os_eventfd_add(int fd)
{
	eventfd_write(fd, 1);
}

int os_thread_start(pthread_t *thread, void *(*run)(void *), void *argument)
{
	FAULT("pthread_create");
	return -pthread_create(thread, NULL, run, argument);
}

int os_thread_start_aside(pthread_t *thread, void *(*run)(void *), void *argument)
{
	sigset_t all, before;
	int rc;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	rc = os_thread_start(thread, run, argument);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return rc;
}

static uint64_t clock_ns(clockid_t clock)
{
	struct timespec ts;

	clock_gettime(clock, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

uint64_t os_now(void)
{
	return clock_ns(CLOCK_MONOTONIC);
}

uint64_t os_date(void)
{
	return clock_ns(CLOCK_REALTIME) / 1000000000u;
}

int os_host(char *name, size_t size)
{
	FAULT("gethostname");
	if (gethostname(name, size) < 0)
		return -errno;
	/* One that was cut need not be terminated. */
	name[size - 1] = 0;
	return 0;
}

uint64_t os_thread_cpu(void)
{
	return clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

void os_sleep(uint64_t ns)
{
	struct timespec ts = { (time_t)(ns / 1000000000ull), (long)(ns % 1000000000ull) };

	nanosleep(&ts, NULL);
}

struct timespec os_from_now(double seconds)
{
	/* A lifetime is as good as for ever, and fits. */
	double wait = seconds > 0 ? (seconds < 1e9 ? seconds : 1e9) : 0;
	uint64_t end = os_now() + (uint64_t)(wait * 1e9);

	return (struct timespec){ (time_t)(end / 1000000000ull), (long)(end % 1000000000ull) };
}

void os_precise_sleep(void)
{
	/* The default slack of 50 us is longer than a copy takes. */
	prctl(PR_SET_TIMERSLACK, 1ul, 0ul, 0ul, 0ul);
}

void os_stand_back(void)
{
	/* Of one thread, whatever POSIX says of the process. */
	setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), 19);
}

static struct {
	pthread_mutex_t *lock;
	void (*in_child)(void);
} fork_places[OS_FORK_PLACES];
static unsigned int generation;

static void before_fork(void)
{
	for (int i = 0; i < OS_FORK_PLACES; i++)
		if (fork_places[i].lock)
			pthread_mutex_lock(fork_places[i].lock);
}

static void after_fork(void)
{
	for (int i = OS_FORK_PLACES - 1; i >= 0; i--)
		if (fork_places[i].lock)
			pthread_mutex_unlock(fork_places[i].lock);
}

static void in_forked_child(void)
{
	generation++;
	for (int i = 0; i < OS_FORK_PLACES; i++)
		if (fork_places[i].in_child)
			fork_places[i].in_child();
	after_fork();
}

void os_at_fork(enum os_fork_place place, pthread_mutex_t *lock, void (*in_child)(void))
{
	fork_places[place].lock = lock;
	fork_places[place].in_child = in_child;
}

/* Also for a program that has none of those modules in it. */
__attribute__((constructor)) static void watch_forks(void)
{
	pthread_atfork(before_fork, after_fork, in_forked_child);
}

unsigned int os_generation(void)
{
	return generation;
}
