/* SPDX-License-Identifier: MIT */
/*
 * Temporary names, and what is left under them when a writer is killed. Such a file is found by its
 * name and removed by the next writer that comes into its folder.
 *
 * A writer that lives holds a lock (flock) on its file. It takes it before the file gets a name;
 * where the file is created with one, right after, and then looks whether the name is still there:
 * who sweeps takes the same lock before it removes a name, so one of both sees the other. A lock is
 * inherited by fork(), so a child that lives on with the descriptor only delays the sweep.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include "io/replace.h"
#include "sys/os.h"

#define MARK ".penstock-"
#define DIGITS 16
/* Of the target's name, so that people see what it was to be. Some file systems allow 143. */
#define BASE_MAX 100
/*
 * Names looked at, at most: a folder of a million files must not slow down every save into it. What
 * lies behind them stays until the folder is smaller.
 */
#define SWEEP_NAMES 4096

int leftover_name(const char *base, char name[NAME_MAX + 1])
{
	size_t length = strnlen(base, BASE_MAX);
	uint64_t number;
	int rc = os_entropy(&number, sizeof(number));

	/* Not in the middle of a letter: some file systems take whole ones only. */
	for (int i = 0; i < 3 && base[length] && ((unsigned char)base[length] & 0xc0) == 0x80; i++)
		length--;
	snprintf(name, NAME_MAX + 1, ".%.*s" MARK "%0*llx", (int)length, base, DIGITS,
		 (unsigned long long)number);
	return rc;
}

bool leftover_is(const char *name)
{
	const char *mark = NULL, *number;

	for (const char *at = name; (at = strstr(at, MARK)); at++)
		mark = at;
	if (name[0] != '.' || !mark || mark < name + 2)
		return false;
	number = mark + strlen(MARK);
	return strlen(number) == DIGITS && strspn(number, "0123456789abcdef") == DIGITS;
}

bool leftover_has_name(int directory, const char *name, int fd)
{
	struct stat own, named;

	return !os_fstat(fd, &own) && !os_lstat(directory, name, &named) &&
	       S_ISREG(own.st_mode) && own.st_dev == named.st_dev && own.st_ino == named.st_ino;
}

/* Whatever cannot be done here is left: it may be somebody else's. */
bool leftover_remove(int directory, const char *name)
{
	struct stat st;
	bool removed;
	int fd;

	/* Looked at before it is opened, which does things to what is no file. */
	if (os_lstat(directory, name, &st) || !S_ISREG(st.st_mode))
		return false;
	fd = os_open(directory, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0);
	if (fd < 0)
		return false;
	removed = !os_lock(fd) && leftover_has_name(directory, name, fd) &&
		  !os_unlink(directory, name);
	os_close(fd);
	return removed;
}

struct sweep {
	int directory;
	unsigned int names;
};

static int sweep_name(const char *name, void *context)
{
	struct sweep *sweep = context;

	if (leftover_is(name))
		leftover_remove(sweep->directory, name);
	return ++sweep->names == SWEEP_NAMES;
}

void leftovers_sweep(const struct place *place)
{
	struct sweep sweep = { .directory = place->directory };

	if (place->listable && leftovers_are_swept(place))
		os_list(place->directory, ".", sweep_name, &sweep);
}

/* Where other machines write too, or might, a lock of this one proves nothing. */
bool leftovers_are_swept(const struct place *place)
{
	char filesystem[32];

	return !os_filesystem(place->directory, filesystem, sizeof(filesystem)) &&
	       os_filesystem_is_own(filesystem);
}
