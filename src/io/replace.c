/* SPDX-License-Identifier: MIT */
/* Where a name leads, and the file that will be found there; see replace.h. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include "io/replace.h"
#include "sys/os.h"

/* As many as the kernel follows. */
#define LINKS_MAX 40
/* Chance names are as good as never taken: who takes so many does it on purpose. */
#define NAMES_TRIED 100

/* ---------------------------------------------------------------------------------- places -- */

/* Go on to the directory of `path`, which starts at the place's own or, for none, at `start`. */
static int enter(int start, const char *path, struct place *place)
{
	const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
	char folder[PATH_MAX];
	int fd;

	if (strlen(base) > NAME_MAX)
		return -ENAMETOOLONG;
	/* With its slash, so that the root is itself. */
	snprintf(folder, sizeof(folder), "%.*s", (int)(base - path), path);
	fd = os_open(place->directory < 0 ? start : place->directory, slash ? folder : ".",
		     O_PATH | O_DIRECTORY, 0);
	if (fd < 0)
		return fd;
	place_leave(place);
	place->directory = fd;
	strcpy(place->base, base);
	return 0;
}

/* Links to the end, even of one that leads to nothing yet: what it points to is created. */
static int follow(int start, const char *name, struct place *place)
{
	char path[PATH_MAX];
	int rc;

	if (strlen(name) >= sizeof(path))
		return -ENAMETOOLONG;
	strcpy(path, name);
	for (int links = 0; links <= LINKS_MAX; links++) {
		rc = enter(start, path, place);
		if (rc)
			return rc;
		if (!place->base[0])
			return -EISDIR;
		rc = os_readlink(place->directory, place->base, path, sizeof(path));
		/* It is no link, or not there. */
		if (rc == -EINVAL || rc == -ENOENT)
			return 0;
		if (rc)
			return rc;
	}
	return -ELOOP;
}

int place_find(int start, const char *name, struct place *place)
{
	int rc, fd;

	place->directory = -1;
	rc = follow(start, name, place);
	/* Now, as later it may not be possible any more: to flush it, it has to be readable. */
	fd = rc ? rc : os_open(place->directory, ".", O_RDONLY | O_DIRECTORY, 0);
	place->listable = fd >= 0;
	if (fd < 0 && fd != -EACCES) {
		place_leave(place);
		return fd;
	}
	if (fd >= 0) {
		os_close(place->directory);
		place->directory = fd;
	}
	return 0;
}

int place_flush(const struct place *place, int fd)
{
	/* A directory that must not be read cannot be flushed by itself. */
	int rc = place->listable ? os_fsync(place->directory) : os_syncfs(fd);

	/* Some file systems have no notion of it. */
	return rc == -EINVAL || rc == -EROFS ? 0 : rc;
}

void place_leave(struct place *place)
{
	if (place->directory >= 0)
		os_close(place->directory);
	place->directory = -1;
}

/* ---------------------------------------------------------------------------- replacements -- */

/* Take the lock that says that somebody is at it; -EBUSY if a sweep was faster. */
static int lock(struct replacement *new, int fd)
{
	int rc = new->locked ? os_lock(fd) : 0;

	/* Then nobody else can have it either. */
	if (rc == -EOPNOTSUPP || rc == -ENOSYS)
		return 0;
	if (rc == -EAGAIN || (!rc && new->locked && new->temporary[0] &&
			      !leftover_has_name(new->place.directory, new->temporary, fd)))
		return -EBUSY;
	return rc;
}

static int create_once(struct replacement *new, mode_t mode)
{
	int fd = leftover_name(new->place.base, new->temporary), rc;

	if (!fd)
		fd = os_open(new->place.directory, new->temporary, O_RDWR | O_CREAT | O_EXCL, mode);
	if (fd < 0) {
		new->temporary[0] = 0;
		return fd;
	}
	rc = lock(new, fd);
	if (!rc)
		return fd;
	replacement_drop(new);
	os_close(fd);
	return rc;
}

static int create_temporary(struct replacement *new, mode_t mode)
{
	int fd = -EEXIST;

	for (int i = 0; i < NAMES_TRIED && (fd == -EEXIST || fd == -EBUSY); i++)
		fd = create_once(new, mode);
	return fd;
}

static int learn_mode(struct replacement *new, int fd)
{
	struct stat st;
	int rc = os_fstat(fd, &st);

	new->mode = st.st_mode & 07777;
	return rc;
}

/* To ask for the umask is to change it, and a directory may give rights of its own: make an empty
 * file as anybody would. */
static int try_mode(struct replacement *new)
{
	int fd = create_temporary(new, 0666), rc;

	if (fd < 0)
		return fd;
	rc = learn_mode(new, fd);
	replacement_drop(new);
	os_close(fd);
	return rc;
}

/* Can it be given a name later? By trying, with one that is taken: versions do not tell. */
static bool can_be_named(struct replacement *new, int fd)
{
	return os_link_fd(fd, new->place.directory, ".") == -EEXIST;
}

/* One without a name; -EOPNOTSUPP where there is none to be had, or it could not be named later. */
static int create_unnamed(struct replacement *new)
{
	int fd = os_open_unnamed(new->place.directory, 0666), rc;

	if (fd == -EISDIR || fd == -EINVAL)
		return -EOPNOTSUPP;
	if (fd < 0)
		return fd;
	rc = can_be_named(new, fd) ? learn_mode(new, fd) : -EOPNOTSUPP;
	if (!rc)
		rc = lock(new, fd);
	if (!rc)
		return fd;
	os_close(fd);
	return rc;
}

int replacement_create(struct replacement *new, const char **step)
{
	int fd, rc;

	new->locked = leftovers_are_swept(&new->place);
	/* Before space is asked for, which they may take up. */
	leftovers_sweep(&new->place);
	*step = "create a file beside";
	fd = create_unnamed(new);
	if (fd != -EOPNOTSUPP)
		return fd;
	rc = try_mode(new);
	/* With a name it can be opened by others; what it may hold is not theirs to read yet. */
	return rc ? rc : create_temporary(new, 0600);
}

static int link_temporary(struct replacement *new, int fd, const char **step)
{
	int rc = -EEXIST;

	*step = "name a file beside";
	if (new->temporary[0])
		return 0;
	for (int i = 0; i < NAMES_TRIED && rc == -EEXIST; i++) {
		rc = leftover_name(new->place.base, new->temporary);
		if (!rc)
			rc = os_link_fd(fd, new->place.directory, new->temporary);
	}
	if (rc)
		new->temporary[0] = 0;
	return rc;
}

int replacement_name(struct replacement *new, int fd, const char **step)
{
	int rc;

	if (new->temporary[0])
		return 0;
	*step = "protect a file beside";
	rc = os_chmod(fd, 0600);
	return rc ? rc : link_temporary(new, fd, step);
}

/* Put a file that has no name into a place that is free; -EEXIST if it is not. */
static int fill_place(struct replacement *new, int fd, const char **step)
{
	*step = "name";
	return os_link_fd(fd, new->place.directory, new->place.base);
}

/* By way of a temporary name: only a rename puts one file into the place of another. */
static int take_place(struct replacement *new, int fd, const char **step)
{
	int rc = link_temporary(new, fd, step);

	if (rc)
		return rc;
	*step = "rename into place";
	rc = os_rename(new->place.directory, new->temporary, new->place.base);
	if (!rc)
		new->temporary[0] = 0;
	return rc;
}

/* The rights it will have, durable; 1 if it is the first in its place and has no name yet. */
static int take_rights(struct replacement *new, int fd, const char **step)
{
	int rc = inherit(&new->place, fd, new->mode, step);

	if (rc < 0)
		return rc;
	/* It was created with them. */
	if (rc == 1 && !new->temporary[0])
		return 1;
	*step = "flush";
	return os_fsync(fd);
}

int replacement_publish(struct replacement *new, int fd, const char **step)
{
	bool fresh;
	int rc = take_rights(new, fd, step);

	if (rc < 0)
		return rc;
	fresh = rc == 1;
	rc = fresh ? fill_place(new, fd, step) : take_place(new, fd, step);
	/* Somebody was faster, and now there is something to replace. */
	if (fresh && rc == -EEXIST) {
		rc = take_rights(new, fd, step);
		rc = rc < 0 ? rc : take_place(new, fd, step);
	}
	/* What is in place may be locked by others for their own ends. */
	if (!rc && new->locked)
		os_unlock(fd);
	return rc;
}

void replacement_drop(struct replacement *new)
{
	if (new->temporary[0])
		os_unlink(new->place.directory, new->temporary);
	new->temporary[0] = 0;
}
