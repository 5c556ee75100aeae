/* SPDX-License-Identifier: MIT */
/* Folders of our own; see stage.h. */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/error.h"
#include "interrupt.h"
#include "stage.h"

#define MARK "penstock-"
#define TRIES 100

static int open_folder(int at, const char *path)
{
	return openat(at, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* Remove what is in a folder. */
static void empty(int folder)
{
	int fd = open_folder(folder, ".");
	DIR *list = fd < 0 ? NULL : fdopendir(fd);
	const struct dirent *entry;

	if (!list) {
		if (fd >= 0)
			close(fd);
		return;
	}
	while ((entry = readdir(list)) != NULL) {
		int inner;

		if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..") ||
		    !unlinkat(folder, entry->d_name, 0))
			continue;
		inner = open_folder(folder, entry->d_name);
		if (inner < 0)
			continue;
		empty(inner);
		close(inner);
		unlinkat(folder, entry->d_name, AT_REMOVEDIR);
	}
	closedir(list);
}

/* ---------------------------------------------------------------------------------- making -- */

static bool is_still(int fd, const char *path)
{
	struct stat held, named;

	return !fstat(fd, &held) && !lstat(path, &named) && held.st_dev == named.st_dev &&
	       held.st_ino == named.st_ino;
}

/* Make the folder and lock it; -EAGAIN: somebody who sweeps was faster. */
static int make(struct stage *stage)
{
	if (mkdir(stage->path, 0777))
		return errno == EEXIST ? -EAGAIN : -errno;
	stage->fd = open_folder(AT_FDCWD, stage->path);
	if (stage->fd < 0) {
		int rc = errno == ENOENT ? -EAGAIN : -errno;

		rmdir(stage->path);
		return rc;
	}
	if ((!flock(stage->fd, LOCK_EX | LOCK_NB) || errno != EWOULDBLOCK) &&
	    is_still(stage->fd, stage->path))
		return 0;
	close(stage->fd);
	return -EAGAIN;
}

int stage_open(struct stage *stage, const char *parent, const char *prefix, struct pen_error *err)
{
	for (int i = 0; i < TRIES; i++) {
		int rc;

		if (asprintf(&stage->path, "%s/%s" MARK "%d-%d", parent, prefix, getpid(), i) < 0) {
			stage->path = NULL;
			return error_sys(err, -ENOMEM, "write to", parent, -1);
		}
		rc = make(stage);
		if (!rc) {
			interrupt_litter(stage->path);
			return 0;
		}
		free(stage->path);
		stage->path = NULL;
		if (rc != -EAGAIN)
			return error_sys(err, rc, "create a folder in", parent, -1);
	}
	return error_sys(err, -EEXIST, "create a folder in", parent, -1);
}

void stage_close(struct stage *stage)
{
	if (!stage->path)
		return;
	interrupt_litter(NULL);
	if (is_still(stage->fd, stage->path)) {
		empty(stage->fd);
		rmdir(stage->path);
	}
	close(stage->fd);
	free(stage->path);
	stage->path = NULL;
}

/* -------------------------------------------------------------------------------- sweeping -- */

/* "PREFIX" MARK "PID-NUMBER", and nothing that a person would write by chance. */
static bool is_stage(const char *name, const char *prefix)
{
	size_t length = strlen(prefix);

	if (strncmp(name, prefix, length) || strncmp(name + length, MARK, strlen(MARK)))
		return false;
	name += length + strlen(MARK);
	for (int part = 0; part < 2; part++) {
		if (!isdigit((unsigned char)*name))
			return false;
		while (isdigit((unsigned char)*name))
			name++;
		if (*name != (part ? 0 : '-'))
			return false;
		name++;
	}
	return true;
}

/* Is somebody at work in it? If not, it is removed. */
static bool sweep(int parent, const char *name)
{
	int fd = open_folder(parent, name);
	struct stat info;
	bool live = false;

	if (fd < 0)
		return false;
	if (!fstat(fd, &info) && info.st_uid == geteuid()) {
		if (!flock(fd, LOCK_EX | LOCK_NB)) {
			empty(fd);
			unlinkat(parent, name, AT_REMOVEDIR);
		} else {
			live = errno == EWOULDBLOCK;
		}
	}
	close(fd);
	return live;
}

bool stage_sweep(const char *parent, const char *prefix)
{
	DIR *list = opendir(parent);
	const struct dirent *entry;
	bool live = false;

	while (list && (entry = readdir(list)) != NULL)
		if (is_stage(entry->d_name, prefix) && sweep(dirfd(list), entry->d_name))
			live = true;
	if (list)
		closedir(list);
	return live;
}

/* ------------------------------------------------------------------------------ new folders -- */

void stage_flush(const char *folder)
{
	int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (fd < 0)
		return;
	fsync(fd);
	close(fd);
}

/* The folder that a path lies in; heap, NULL: no memory. */
static char *folder_of(const char *path)
{
	const char *slash = strrchr(path, '/');

	return !slash ? strdup(".") : strndup(path, slash > path ? (size_t)(slash - path) : 1);
}

int stage_beside(struct stage *stage, const char *folder, struct pen_error *err)
{
	char *parent = folder_of(folder), prefix[NAME_MAX];
	const char *slash = strrchr(folder, '/');
	int rc;

	if (!parent)
		return error_sys(err, -ENOMEM, "create", folder, -1);
	snprintf(prefix, sizeof(prefix), ".%.200s.", slash ? slash + 1 : folder);
	stage_sweep(parent, prefix);
	rc = stage_open(stage, parent, prefix, err);
	free(parent);
	if (rc)
		error_sys(err, rc, "create", folder, -1);
	if (rc == -ENOENT)
		error_hint(err, "The folder that it is to lie in does not exist");
	else if (rc == -EACCES)
		error_hint(err, "Check the permissions of the folder that it is to lie in");
	else if (rc == -ENOTDIR)
		error_hint(err, "A part of the path is a file, not a folder");
	else if (rc == -EROFS)
		error_hint(err, "The file system is mounted read-only; write elsewhere");
	return rc;
}

int stage_publish(const struct stage *stage, const char *folder, struct pen_error *err)
{
	char *parent;

	if (rename(stage->path, folder)) {
		int rc = error_sys(err, -errno, "name", folder, -1);

		error_hint(err, "Somebody made it meanwhile; name another folder");
		return rc;
	}
	parent = folder_of(folder);
	if (parent)
		stage_flush(parent);
	free(parent);
	return 0;
}
