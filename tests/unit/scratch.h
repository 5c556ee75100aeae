/* SPDX-License-Identifier: MIT */
#ifndef SCRATCH_H
#define SCRATCH_H
/*
 * A directory for one case, and files in it that hold the pattern. It lies where TMPDIR says, and
 * goes away when the case ends, however it ends.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/pattern.h"
#include "test.h"

static char scratch[200];
static pid_t scratch_owner;

static inline void scratch_remove(void)
{
	char command[300];

	if (!scratch[0] || scratch_owner != getpid())
		return;
	snprintf(command, sizeof(command), "rm -rf '%s'", scratch);
	if (system(command))
		fprintf(stderr, "%s stays\n", scratch);
}

/* "DIRECTORY/name", in one of a few buffers that take turns. */
static inline const char *in_scratch(const char *name)
{
	static char paths[8][600];
	static unsigned int turn;
	char *path = paths[turn++ % 8];

	if (!scratch[0]) {
		const char *where = getenv("TMPDIR");

		snprintf(scratch, sizeof(scratch), "%.150s/penstock-unit.XXXXXX",
			 where && where[0] ? where : "/tmp");
		CHECK(mkdtemp(scratch) != NULL);
		scratch_owner = getpid();
		atexit(scratch_remove);
	}
	snprintf(path, sizeof(paths[0]), "%s/%.300s", scratch, name);
	return path;
}

/* A file of `size` bytes of the pattern, flushed so that its pages can be dropped. */
static inline const char *make_file(const char *name, uint64_t size)
{
	static unsigned char block[1 << 20];
	const char *path = in_scratch(name);
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

	CHECK(fd >= 0);
	for (uint64_t at = 0; at < size; at += sizeof(block)) {
		size_t part = size - at < sizeof(block) ? (size_t)(size - at) : sizeof(block);

		pattern_fill(block, part, at);
		CHECK_EQ(pwrite(fd, block, part, (off_t)at), part);
	}
	CHECK(!fsync(fd));
	close(fd);
	return path;
}

/* How many bytes of the file are the pattern, from its first on. */
static inline uint64_t good_bytes(const char *path)
{
	static unsigned char block[1 << 20];
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	uint64_t at = 0;
	ssize_t n;

	CHECK(fd >= 0);
	while ((n = pread(fd, block, sizeof(block), (off_t)at)) > 0) {
		size_t good = pattern_check(block, (size_t)n, at);

		at += good;
		if (good < (size_t)n)
			break;
	}
	close(fd);
	return at;
}

/* From here on what fails says so by its status alone. */
static inline void close_standard_streams(void)
{
	for (int fd = 0; fd < 3; fd++)
		close(fd);
}

static inline bool standard_streams_are_closed(void)
{
	for (int fd = 0; fd < 3; fd++)
		if (fcntl(fd, F_GETFD) >= 0)
			return false;
	return true;
}

static inline unsigned int entries_in(const char *path)
{
	DIR *dir = opendir(path);
	unsigned int count = 0;

	CHECK(dir != NULL);
	for (struct dirent *entry; (entry = readdir(dir)) != NULL;)
		count += strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..");
	closedir(dir);
	return count;
}

#endif
