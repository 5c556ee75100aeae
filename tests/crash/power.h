/* SPDX-License-Identifier: MIT */
#ifndef CRASH_POWER_H
#define CRASH_POWER_H
/*
 * The log from which a loss of power is played. The calls that decide what survives are wrapped by
 * the linker (-Wl,--wrap, in tests/meson.build) and written down with what they touch, after the
 * fact: only what has ended can be relied upon, and only if it worked.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "test.h"

#define EVENTS_MAX 4096

enum event_kind { WRITE, FLUSH, NAME, UNNAME, DONE };

struct event {
	enum event_kind kind;
	ino_t inode;			/* of the file or folder; NAME: what has it from now on */
	ino_t folder;			/* NAME, UNNAME: where */
	uint64_t offset, length;	/* WRITE */
	uint64_t step;			/* DONE: what is durable from now on, for who has several */
	char name[40];			/* NAME, UNNAME */
};

static struct event events[EVENTS_MAX];
static unsigned int event_count;
static atomic_bool recording;

static void note(const struct event *event)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

	if (!recording)
		return;
	pthread_mutex_lock(&lock);
	CHECK(event_count < EVENTS_MAX);
	events[event_count++] = *event;
	pthread_mutex_unlock(&lock);
}

static ino_t inode_at(int folder, const char *name, int flags)
{
	struct stat st;

	return fstatat(folder, name, &st, flags) ? 0 : st.st_ino;
}

static ino_t inode_of(int fd)
{
	return inode_at(fd, "", AT_EMPTY_PATH);
}

static ino_t inode_named(const char *path)
{
	return inode_at(AT_FDCWD, path, 0);
}

/* A path is another name in another folder. What has a name is held, as its inode must not be used
 * again for another. */
static void note_name(enum event_kind kind, int folder, const char *path)
{
	const char *slash = strrchr(path, '/');
	struct event event = { .kind = kind, .folder = inode_of(folder) };
	char above[600];

	if (slash) {
		snprintf(above, sizeof(above), "%.*s", (int)(slash - path), path);
		event.folder = inode_at(folder, above, 0);
	}
	snprintf(event.name, sizeof(event.name), "%s", slash ? slash + 1 : path);
	if (recording && kind == NAME)
		CHECK(openat(folder, path, O_PATH | O_NOFOLLOW | O_CLOEXEC) >= 0);
	if (kind == NAME)
		event.inode = inode_at(folder, path, AT_SYMLINK_NOFOLLOW);
	note(&event);
}

static void note_write(int fd, off_t offset, ssize_t n)
{
	if (n > 0)
		note(&(struct event){ .kind = WRITE, .inode = inode_of(fd),
				      .offset = (uint64_t)offset, .length = (uint64_t)n });
}

static void note_flush(int fd, int rc)
{
	if (!rc)
		note(&(struct event){ .kind = FLUSH, .inode = inode_of(fd) });
}

/* The function that is called in the place of another. */
#define REAL(type, name, ...)                 \
	type __real_##name(__VA_ARGS__);      \
	type __wrap_##name(__VA_ARGS__);      \
	type __wrap_##name(__VA_ARGS__)

REAL(ssize_t, pwrite, int fd, const void *bytes, size_t length, off_t offset)
{
	ssize_t n = __real_pwrite(fd, bytes, length, offset);

	note_write(fd, offset, n);
	return n;
}

REAL(ssize_t, pwrite64, int fd, const void *bytes, size_t length, off_t offset)
{
	ssize_t n = __real_pwrite64(fd, bytes, length, offset);

	note_write(fd, offset, n);
	return n;
}

REAL(int, fdatasync, int fd)
{
	int rc = __real_fdatasync(fd);

	note_flush(fd, rc);
	return rc;
}

REAL(int, fsync, int fd)
{
	int rc = __real_fsync(fd);

	note_flush(fd, rc);
	return rc;
}

/* A new file is linked into place by its descriptor, without a name before. */
REAL(int, linkat, int fd, const char *from, int folder, const char *to, int flags)
{
	int rc = __real_linkat(fd, from, folder, to, flags);

	if (!rc)
		note_name(NAME, folder, to);
	return rc;
}

/* Both names are of one folder here, and change together. */
REAL(int, renameat, int folder, const char *from, int to_folder, const char *to)
{
	int rc = __real_renameat(folder, from, to_folder, to);

	if (!rc)
		note_name(NAME, to_folder, to);
	return rc;
}

REAL(int, unlinkat, int folder, const char *path, int flags)
{
	int rc = __real_unlinkat(folder, path, flags);

	if (!rc)
		note_name(UNNAME, folder, path);
	return rc;
}

REAL(int, mkdirat, int folder, const char *path, mode_t mode)
{
	int rc = __real_mkdirat(folder, path, mode);

	if (!rc)
		note_name(NAME, folder, path);
	return rc;
}

/* Was a file or a folder flushed between an event and the loss? */
static bool flushed(unsigned int at, unsigned int cut, ino_t inode)
{
	for (unsigned int i = at + 1; i < cut; i++)
		if (events[i].kind == FLUSH && events[i].inode == inode)
			return true;
	return false;
}

/* Deterministic coins. */
static unsigned int coin(unsigned int sides)
{
	static uint64_t state = 88172645463325252ull;

	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (unsigned int)(state >> 33) % sides;
}

#endif
