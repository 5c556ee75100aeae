/* SPDX-License-Identifier: MIT */
#ifndef KIT_H
#define KIT_H
/*
 * What the conform, fault and crash programs share: scratch folders that clean up after
 * themselves, files full of the pattern, cold and warm page caches, and counts of what may leak.
 * A failed case says which cell of its matrix it was in (kit_at).
 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include "base/pattern.h"
#include "penstock.h"
#include "../unit/test.h"

#define KIB ((uint64_t)1 << 10)
#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define KIT __attribute__((unused)) static

/* Sanitizers: time means little under any, and the one for threads is slow. */
#ifndef __has_feature
#define __has_feature(name) 0
#endif
#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
#define KIT_TSAN 1
#else
#define KIT_TSAN 0
#endif
#if KIT_TSAN || defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define KIT_SANITIZED 1
#else
#define KIT_SANITIZED 0
#endif

/* The error of the last call; OK() prints it. */
KIT _Thread_local struct pen_error kit_err;
KIT char kit_where[256];
KIT char kit_folders[2][64];

/* As sys_fault_hook: one call fails. Made so far, and which one it is; 0: none. */
KIT atomic_uint kit_calls, kit_wrong_call;

KIT int kit_fail_one(const char *name)
{
	/* What fails to give back is lost by definition. */
	if (!strcmp(name, "unlink") || ++kit_calls != kit_wrong_call)
		return 0;
	return strstr(name, "alloc") ? ENOMEM : EIO;
}

/* Say where in the matrix we are; printed when the case fails. */
__attribute__((format(printf, 1, 2)))
KIT void kit_at(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(kit_where, sizeof(kit_where), format, args);
	va_end(args);
}

/* And where in the cell. */
__attribute__((format(printf, 1, 2)))
KIT void kit_part(const char *format, ...)
{
	static char cell[192];
	char *mark = strstr(kit_where, " - ");
	char part[60];
	va_list args;

	if (mark)
		*mark = 0;
	va_start(args, format);
	vsnprintf(part, sizeof(part), format, args);
	va_end(args);
	snprintf(cell, sizeof(cell), "%.180s", kit_where);
	snprintf(kit_where, sizeof(kit_where), "%s - %s", cell, part);
}

KIT void kit_words(const char *file, int line, const char *call, int rc)
{
	char text[1024];

	pen_error_format(&kit_err, text, sizeof(text));
	fprintf(stderr, "%s:%d: %s gave %d: %s\n", file, line, call, rc, text);
}

#define OK(call)                                                               \
	do {                                                                   \
		int kit_rc = (call);                                           \
		if (kit_rc) {                                                  \
			kit_words(__FILE__, __LINE__, #call, kit_rc);          \
			exit(1);                                               \
		}                                                              \
	} while (0)

/*
 * Something that this machine cannot run. On the machines that are known to have all of it (see
 * tests/conftest.py) that is a failure, or a case would pass without what it is named after.
 */
__attribute__((format(printf, 1, 2)))
KIT void kit_not_run(const char *format, ...)
{
	const char *every = getenv("PENSTOCK_EVERY_CELL");
	va_list args;

	va_start(args, format);
	printf("not run: ");
	vprintf(format, args);
	printf("\n");
	va_end(args);
	if (!every || strcmp(every, "1"))
		return;
	fprintf(stderr, "not run, but this machine should: PENSTOCK_EVERY_CELL is 1\n");
	exit(1);
}

/* The call fails with this errno, and in words. */
#define REFUSED(wanted, call)                                                   \
	do {                                                                   \
		int kit_rc = (call);                                           \
		if (kit_rc != (wanted) || kit_err.code != kit_rc || !kit_err.message[0] || \
		    !kit_err.operation[0]) {                                   \
			kit_words(__FILE__, __LINE__, "wanted " #wanted " from " #call, kit_rc); \
			exit(1);                                               \
		}                                                              \
	} while (0)

/* Calls `each` on every name in a folder; returns how many there are. */
KIT unsigned int kit_list(const char *folder, void (*each)(const char *path))
{
	DIR *dir = opendir(folder);
	struct dirent *entry;
	unsigned int count = 0;
	char path[512];

	while (dir && (entry = readdir(dir)) != NULL) {
		if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
			continue;
		count++;
		snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
		if (each)
			each(path);
	}
	if (dir)
		closedir(dir);
	return count;
}

KIT void kit_unlink(const char *path)
{
	unlink(path);
}

KIT void kit_end(int status, void *owner)
{
	if ((pid_t)(intptr_t)owner != getpid())
		return;
	if (status && status != TEST_SKIPPED && kit_where[0])
		fprintf(stderr, "at: %s\n", kit_where);
	for (size_t i = 0; i < COUNT(kit_folders); i++) {
		if (!kit_folders[i][0])
			continue;
		kit_list(kit_folders[i], kit_unlink);
		rmdir(kit_folders[i]);
	}
}

enum kit_store { DISK, SHM };

/* A scratch folder on the disk or in shared memory, gone when this process ends. */
KIT const char *kit_folder(enum kit_store store)
{
	static bool armed;
	const char *root = store == SHM ? "/dev/shm" : getenv("TMPDIR");
	char *folder = kit_folders[store];

	if (!armed)
		on_exit(kit_end, (void *)(intptr_t)getpid());
	armed = true;
	if (folder[0])
		return folder;
	snprintf(folder, sizeof(kit_folders[0]), "%.40s/penstock-XXXXXX", root ? root : "/tmp");
	CHECK(mkdtemp(folder) != NULL);
	return folder;
}

/* Write the pattern, or one byte over and over, to [offset, offset + length) of a file. */
KIT void kit_write(const char *path, uint64_t offset, uint64_t length, int byte)
{
	static unsigned char buffer[1 << 20];
	int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);

	CHECK(fd >= 0);
	for (uint64_t at = 0; at < length;) {
		size_t part = length - at < sizeof(buffer) ? (size_t)(length - at) : sizeof(buffer);

		if (byte < 0)
			pattern_fill(buffer, part, offset + at);
		else
			memset(buffer, byte, part);
		CHECK_EQ(pwrite(fd, buffer, part, (off_t)(offset + at)), part);
		at += part;
	}
	CHECK_EQ(fsync(fd), 0);
	close(fd);
}

KIT void kit_pattern(const char *path, uint64_t length)
{
	kit_write(path, 0, length, -1);
}

/* Take a range out of the page cache, or bring it in. A length of 0 means to the end. */
KIT void kit_cool(const char *path, uint64_t offset, uint64_t length)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	CHECK(fd >= 0);
	posix_fadvise(fd, (off_t)offset, (off_t)length, POSIX_FADV_DONTNEED);
	close(fd);
}

KIT void kit_warm(const char *path, uint64_t offset, uint64_t length)
{
	static unsigned char buffer[1 << 20];
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	uint64_t at = 0;
	ssize_t n = 1;

	CHECK(fd >= 0);
	while ((!length || at < length) && n > 0) {
		n = pread(fd, buffer, sizeof(buffer), (off_t)(offset + at));
		at += (uint64_t)n;
	}
	close(fd);
}

/* Does the file hold exactly `size` bytes of the pattern? */
KIT bool kit_holds(const char *path, uint64_t size)
{
	static unsigned char buffer[1 << 20];
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	uint64_t at = 0;
	ssize_t n;

	if (fd < 0)
		return false;
	while ((n = pread(fd, buffer, sizeof(buffer), (off_t)at)) > 0 &&
	       pattern_check(buffer, (size_t)n, at) == (size_t)n)
		at += (uint64_t)n;
	close(fd);
	return !n && at == size;
}

KIT unsigned int kit_descriptors(void)
{
	return kit_list("/proc/self/fd", NULL);
}

KIT unsigned int kit_threads(void)
{
	return kit_list("/proc/self/task", NULL);
}

KIT int kit_leaks_of(const char *name, const char *function)
{
	void *library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
	int (*leaks)(char *, size_t) = NULL;
	char text[2000] = "";
	int count;

	if (library)
		*(void **)&leaks = dlsym(library, function);
	count = leaks ? leaks(text, sizeof(text)) : 0;
	if (count)
		fprintf(stderr, "%s: %s", name, text);
	if (library)
		dlclose(library);
	return count;
}

/* Is the driver that runs ours? */
KIT bool kit_fake_cuda(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	bool fake = library && dlsym(library, "fake_cuda_leaks");

	if (library)
		dlclose(library);
	return fake;
}

/* What the fake drivers think was left behind or done wrong; 0 where real ones run, or none. */
KIT int kit_leaks(void)
{
	return kit_leaks_of("libcuda.so.1", "fake_cuda_leaks") +
	       kit_leaks_of("libcufile.so.0", "fake_cufile_leaks");
}

/* Is cuda:N to be had, be it fake? Two fake GPUs are asked for; must come before any other use. */
KIT struct pen_device *kit_device(const char *name)
{
	struct pen_device *device;

	setenv("FAKE_CUDA_DEVICES", "2", 0);
	if (!pen_device_open(name, &device, &kit_err)) {
		if (!pen_device_ready(device, &kit_err))
			return device;
		pen_device_close(device);
	}
	kit_not_run("%s: %s", name, kit_err.message);
	return NULL;
}

/* Does the disk folder do what the engine does with a disk? Asked of the kernel, not the engine. */
KIT bool kit_has_direct(void)
{
	const long tmpfs = 0x01021994;
	struct statfs fs;
	char path[300];
	int fd;

	snprintf(path, sizeof(path), "%s/direct", kit_folder(DISK));
	fd = open(path, O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
	unlink(path);
	if (fd < 0)
		return false;
	CHECK(!fstatfs(fd, &fs));
	close(fd);
	return (long)fs.f_type != tmpfs;
}

KIT bool kit_has_uring(void)
{
	struct io_uring_params params = { 0 };
	int fd = (int)syscall(__NR_io_uring_setup, 4, &params);

	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

KIT bool kit_has_path(const struct pen_report *report, const char *name)
{
	for (uint32_t i = 0; i < report->path_count; i++)
		if (!strcmp(report->paths[i].path, name) && report->paths[i].bytes)
			return true;
	return false;
}

#endif
