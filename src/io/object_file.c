/* SPDX-License-Identifier: MIT */
/*
 * A file as an object. For reading it has two descriptors, one buffered and one O_DIRECT where the
 * file system allows. For writing, the bytes go to a file beside the target that has no name yet:
 *
 *   open: O_TMPFILE, space reserved
 *   commit: flushed -> given a temporary name -> renamed over the target -> directory flushed
 *   close without commit: the kernel frees the unnamed file, also after kill -9
 *
 * Where O_TMPFILE is not to be had the file has its temporary name from the start, and close
 * removes it.
 *
 * Invariants
 *   1. The target's bytes, mode, owner and name do not change before commit's rename, and an
 *      error before the rename leaves the target as it was.
 *   2. The descriptors refer to the same file until close.
 *   3. Things that are not regular files (devices, pipes' cousins like /dev/null) are written in
 *      place: there is nothing to rename.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <unistd.h>
#include "base/error.h"
#include "base/text.h"
#include "io/object.h"
#include "sys/os.h"

struct file_state {
	struct stat opened;		/* as it was at open */
	char target[PATH_MAX];		/* what commit replaces; links resolved */
	char directory[PATH_MAX];
	char temporary[PATH_MAX + 256];	/* "" while the file has no name */
	int (*residency)(int fd, uint64_t offset, uint64_t length, uint64_t *pages);
	int residency_fd;
	int unnamed_fd;			/* direct, from before the file had a name; -1: none */
	bool renamed;			/* the target is the new file already */
	bool in_place;
	bool created; /* in place, and the file is new: removed if never committed */
	unsigned int generation;	/* os_generation() of the process that opened it */
};

static int fail(struct pen_object *object, int rc, const char *operation, struct pen_error *err)
{
	error_sys(err, rc, operation, object->name, -1);
	switch (rc) {
	case -ENOENT:
		error_hint(err, object->mode == PEN_READ ? "Check the path"
							  : "Create the directory first");
		break;
	case -EACCES:
	case -EPERM:
		error_hint(err, "Check the permissions of the file and its directory");
		break;
	case -ENOSPC:
	case -EDQUOT:
		error_hint(err, object->mode == PEN_WRITE
					? "Free some space; the target was left as it was"
					: "Free some space");
		break;
	case -ELOOP:
		error_hint(err, "Its links lead round in a circle; name the file itself");
		break;
	case -ENOTDIR:
		error_hint(err, "A part of the path is a file, not a directory");
		break;
	case -ENAMETOOLONG:
		error_hint(err, "Take a shorter name, or go to its directory first");
		break;
	case -EFBIG:
		error_hint(err, "Raise the limit of file size (ulimit -f), or write elsewhere");
		break;
	case -EROFS:
		error_hint(err, "The file system is mounted read-only; write elsewhere");
		break;
	case -EMFILE:
		error_hint(err, "Raise the limit of open files, which is %llu (ulimit -n)",
			   (unsigned long long)os_files_limit());
		break;
	case -ENFILE:
		error_hint(err, "The whole system has too many files open (fs.file-max)");
		break;
	}
	return rc;
}

static void describe(struct pen_object *object, const struct stat *st)
{
	struct object_info *info = &object->info;

	if (os_filesystem(object->fd, info->filesystem, sizeof(info->filesystem)))
		text_copy(info->filesystem, sizeof(info->filesystem), "unknown");
	/* The device number is the store: one disk, one mount, one knee. */
	snprintf(info->store, sizeof(info->store), "%s %u:%u", info->filesystem,
		 major(st->st_dev), minor(st->st_dev));
	info->has_residency = S_ISREG(st->st_mode);
}

/* Open the O_DIRECT descriptor and learn its alignment; where that fails, keep the reason. */
static void open_direct(struct pen_object *object, int flags)
{
	struct object_info *info = &object->info;
	uint32_t memory = 0, offset = 0;
	char self[64];
	int fd, rc;

	/* Newer kernels allow O_DIRECT there, but there is nothing to go around. */
	if (!strcmp(info->filesystem, "tmpfs") || !strcmp(info->filesystem, "ramfs")) {
		snprintf(info->no_direct, sizeof(info->no_direct), "%s is the page cache itself",
			 info->filesystem);
		return;
	}
	snprintf(self, sizeof(self), "/proc/self/fd/%d", object->fd);
	fd = os_open(self, flags | O_DIRECT, 0);
	if (fd < 0) {
		char buffer[128];

		snprintf(info->no_direct, sizeof(info->no_direct), "%s%s: %s",
			 fd == -EINVAL ? info->filesystem : "it cannot be opened again",
			 fd == -EINVAL ? " refuses O_DIRECT" : " with O_DIRECT",
			 strerror_r(-fd, buffer, sizeof(buffer)));
		return;
	}
	rc = os_direct_alignment(fd, &memory, &offset);
	if (!rc && !offset) {
		snprintf(info->no_direct, sizeof(info->no_direct),
			 "%s cannot do direct I/O on this file", info->filesystem);
		os_close(fd);
		return;
	}
	/* Kernels before 6.1 do not say; 4096 satisfies every device. */
	if (rc)
		memory = offset = 4096;
	object->direct_fd = fd;
	info->memory_align = memory;
	/* Direct writes keep to whole pages, so that no page is shared with buffered edges. */
	if (object->mode != PEN_READ && offset < os_page_size())
		offset = (uint32_t)os_page_size();
	info->offset_align = offset;
}

static int check_kind(struct pen_object *object, const struct stat *st, struct pen_error *err)
{
	if (S_ISDIR(st->st_mode)) {
		error_sys(err, -EISDIR, "open", object->name, -1);
		error_hint(err, "Name a file in it");
		return -EISDIR;
	}
	if (S_ISFIFO(st->st_mode) || S_ISSOCK(st->st_mode)) {
		error_set(err, -ESPIPE, "open", object->name, -1,
			  "a pipe or socket cannot be read or written at offsets");
		error_hint(err, "Use a regular file");
		return -ESPIPE;
	}
	return 0;
}

/*
 * How to ask what of a file is cached. The kernel tells about pages only those who own the file or
 * may write it (cachestat refuses others, mincore pretends that all is there), and older kernels
 * have no cachestat. Who may only read looks at a few places instead.
 */
static void choose_residency(struct pen_object *object)
{
	struct file_state *state = object->state;
	uint64_t pages;
	char self[64];
	int rc = os_cachestat(object->fd, 0, os_page_size(), &pages);

	snprintf(self, sizeof(self), "/proc/self/fd/%d", object->fd);
	state->residency_fd = object->fd;
	if (!rc) {
		state->residency = os_cachestat;
	} else if (rc == -ENOSYS && !os_may_write(self)) {
		state->residency = os_mincore;
	} else {
		/* A descriptor of its own, so that a look fetches one page and no more. */
		rc = os_open(self, O_RDONLY, 0);
		if (rc < 0)
			return;
		state->residency_fd = rc;
		state->residency = os_random(rc) ? NULL : os_cached_sample;
	}
}

/*
 * A size of 0 must mean empty: devices and the files of /proc have bytes, but no size, and some of
 * these files refuse to be read at their start.
 */
static int check_size(struct pen_object *object, const struct stat *st, struct pen_error *err)
{
	char byte;

	if (!S_ISCHR(st->st_mode) && (!S_ISREG(st->st_mode) || st->st_size))
		return 0;
	if (S_ISREG(st->st_mode) && strcmp(object->info.filesystem, "proc") &&
	    !os_pread(object->fd, &byte, 1, 0))
		return 0;
	error_set(err, -ESPIPE, "open", object->name, -1, "it does not tell how large it is");
	error_hint(err, "Write what it holds to a regular file first");
	return -ESPIPE;
}

static int open_for_reading(struct pen_object *object, struct pen_error *err)
{
	struct file_state *state = object->state;
	int rc = os_open(object->name, O_RDONLY | O_NONBLOCK, 0);

	if (rc < 0)
		return fail(object, rc, "open", err);
	object->fd = rc;
	rc = os_fstat(object->fd, &state->opened);
	if (rc)
		return fail(object, rc, "stat", err);
	rc = check_kind(object, &state->opened, err);
	if (rc)
		return rc;
	describe(object, &state->opened);
	rc = check_size(object, &state->opened, err);
	if (rc)
		return rc;
	object->info.size = (uint64_t)state->opened.st_size;
	if (S_ISBLK(state->opened.st_mode)) {
		rc = os_end(object->fd, &object->info.size);
		if (rc)
			return fail(object, rc, "find the end of", err);
	}
	if (object->info.has_residency)
		choose_residency(object);
	open_direct(object, O_RDONLY);
	return 0;
}

/* Split the resolved target into directory and temporary name. */
static void name_temporary(struct file_state *state, const char **base)
{
	static atomic_uint counter;
	const char *slash = strrchr(state->target, '/');

	*base = slash ? slash + 1 : state->target;
	if (!slash)
		strcpy(state->directory, ".");
	else if (slash == state->target)
		strcpy(state->directory, "/");
	else
		snprintf(state->directory, sizeof(state->directory), "%.*s",
			 (int)(slash - state->target), state->target);
	/* Long names are cut so that ours stays within NAME_MAX. */
	snprintf(state->temporary, sizeof(state->temporary), "%s/.%.200s.penstock-%d-%u",
		 state->directory, *base, getpid(), atomic_fetch_add(&counter, 1));
}

static int open_beside(struct pen_object *object, bool exists, struct pen_error *err)
{
	struct file_state *state = object->state;
	const char *base;
	/* Replacing needs only the directory's leave, but who protects a file means it. */
	int fd = exists ? os_may_write(state->target) : 0;

	if (fd < 0)
		return fail(object, fd, "replace", err);
	name_temporary(state, &base);
	fd = os_open(state->directory, O_TMPFILE | O_RDWR, 0666);
	if (fd >= 0)
		state->temporary[0] = 0;
	else if (fd == -EOPNOTSUPP || fd == -EISDIR || fd == -EINVAL)
		fd = os_open(state->temporary, O_RDWR | O_CREAT | O_EXCL, 0666);
	if (fd < 0) {
		state->temporary[0] = 0;
		return fail(object, fd, "create a file beside", err);
	}
	object->fd = fd;
	return 0;
}

static int open_in_place(struct pen_object *object, bool exists, struct pen_error *err)
{
	struct file_state *state = object->state;
	int fd = os_open(state->target, O_RDWR | O_CREAT | (exists ? 0 : O_EXCL), 0666);

	if (fd == -EACCES && exists)
		fd = os_open(state->target, O_WRONLY, 0);
	if (fd < 0)
		return fail(object, fd, "open for writing", err);
	object->fd = fd;
	state->in_place = true;
	state->created = !exists;
	return 0;
}

/* Reserve the space now: a full disk shows before the first byte, not after the last. */
static int reserve(struct pen_object *object, struct pen_error *err)
{
	struct file_state *state = object->state;
	uint64_t size = object->info.size;
	struct stat st;
	int rc = os_fstat(object->fd, &st);

	if (rc)
		return fail(object, rc, "stat", err);
	if (!S_ISREG(st.st_mode) || !size)
		return 0;
	if (state->in_place && !state->created && (uint64_t)st.st_size >= size)
		return 0;
	rc = os_fallocate(object->fd, size);
	if (rc == -EOPNOTSUPP || rc == -ENOSYS)
		rc = os_truncate(object->fd, size);
	if (!rc)
		return 0;
	/* A part may have been had; a file of the user's gets its old size back. */
	if (state->in_place && !state->created)
		os_truncate(object->fd, (uint64_t)st.st_size);
	return fail(object, rc, "reserve space for", err);
}

/* A link to nothing yet: what it points to is created, and the link stays a link. */
static void follow_links(char target[PATH_MAX])
{
	char link[PATH_MAX], joined[2 * PATH_MAX];

	for (int hops = 0; hops < 16 && !os_readlink(target, link, sizeof(link)); hops++) {
		char *slash = strrchr(target, '/');

		if (link[0] == '/' || !slash)
			snprintf(joined, sizeof(joined), "%s", link);
		else
			snprintf(joined, sizeof(joined), "%.*s/%s", (int)(slash - target), target,
				 link);
		if (strlen(joined) >= PATH_MAX)
			return;
		strcpy(target, joined);
	}
}

static int open_for_writing(struct pen_object *object, struct pen_error *err)
{
	struct file_state *state = object->state;
	struct stat st;
	bool exists;
	int rc = os_stat(object->name, &state->opened);

	exists = !rc;
	if (rc && rc != -ENOENT)
		return fail(object, rc, "stat", err);
	if (exists) {
		rc = check_kind(object, &state->opened, err);
		if (rc)
			return rc;
		/* Through links to the file itself: a link stays a link. */
		rc = os_realpath(object->name, state->target);
		if (rc)
			return fail(object, rc, "resolve", err);
	} else {
		size_t length = strlen(object->name);

		if (length >= sizeof(state->target))
			return fail(object, -ENAMETOOLONG, "create", err);
		if (object->name[length - 1] == '/')
			return fail(object, -EISDIR, "create", err);
		strcpy(state->target, object->name);
		follow_links(state->target);
	}
	if (object->mode == PEN_WRITE_IN_PLACE || (exists && !S_ISREG(state->opened.st_mode)))
		rc = open_in_place(object, exists, err);
	else
		rc = open_beside(object, exists, err);
	if (rc)
		return rc;
	rc = reserve(object, err);
	if (rc)
		return rc;
	rc = os_fstat(object->fd, &st);
	if (rc)
		return fail(object, rc, "stat", err);
	describe(object, &st);
	if (S_ISREG(st.st_mode) || S_ISBLK(st.st_mode))
		open_direct(object, O_WRONLY);
	else
		text_copy(object->info.no_direct, sizeof(object->info.no_direct),
			  "it is a character device");
	return 0;
}

static void file_close(struct pen_object *object)
{
	struct file_state *state = object->state;

	/* What a forked child inherited is its parent's to finish. */
	if (!object->committed && state->generation == os_generation()) {
		if (state->temporary[0])
			os_unlink(state->temporary);
		if (state->created)
			os_unlink(state->target);
	}
	if (object->direct_fd >= 0)
		os_close(object->direct_fd);
	if (state->unnamed_fd >= 0)
		os_close(state->unnamed_fd);
	if (state->residency_fd >= 0 && state->residency_fd != object->fd)
		os_close(state->residency_fd);
	if (object->fd >= 0)
		os_close(object->fd);
	free(state);
}

static int file_open(struct pen_object *object, struct pen_error *err)
{
	int rc;

	struct file_state *state = os_calloc(1, sizeof(*state));

	if (!state)
		return error_sys(err, -ENOMEM, "open", object->name, -1);
	state->residency_fd = state->unnamed_fd = -1;
	state->generation = os_generation();
	object->state = state;
	rc = object->mode == PEN_READ ? open_for_reading(object, err)
				      : open_for_writing(object, err);
	if (rc)
		file_close(object);
	return rc;
}

const char *object_residency_method(const struct pen_object *object)
{
	const struct file_state *state = object->state;

	if (!object->info.has_residency || !state->residency)
		return "none";
	return state->residency == os_cachestat ? "cachestat"
	       : state->residency == os_mincore ? "mincore"
						: "samples";
}

static int file_residency(struct pen_object *object, uint64_t offset, uint64_t length,
			  uint64_t *resident, struct pen_error *err)
{
	struct file_state *state = object->state;
	uint64_t pages = 0, bytes;
	int rc = state->residency ? state->residency(state->residency_fd, offset, length, &pages)
				  : -ENOTSUP;

	if (rc)
		return fail(object, rc, "ask for the page cache of", err);
	bytes = pages * os_page_size();
	*resident = bytes < length ? bytes : length;
	return 0;
}

static bool same_time(struct timespec a, struct timespec b)
{
	return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

static bool same_file(const struct stat *a, const struct stat *b)
{
	return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/*
 * Was it written to, and its time of modification set back (touch -r, rsync --inplace)? The time of
 * change cannot be set, but it moves along with names and rights too: it proves something only
 * while these are as they were. New extended attributes move it as well and look like a write; a
 * load that is refused can be had again, one of changed bytes cannot be noticed any more.
 */
static bool written_in_secret(const struct stat *then, const struct stat *now,
			      const struct stat *named)
{
	return !same_time(then->st_ctim, now->st_ctim) && then->st_nlink == now->st_nlink &&
	       then->st_mode == now->st_mode && then->st_uid == now->st_uid &&
	       then->st_gid == now->st_gid && same_file(now, named);
}

static int file_unchanged(struct pen_object *object, struct pen_error *err)
{
	struct file_state *state = object->state;
	const struct stat *then = &state->opened;
	struct stat now, named;
	bool has_name;
	int rc;

	if (object->mode != PEN_READ || !S_ISREG(then->st_mode))
		return 0;
	rc = os_fstat(object->fd, &now);
	if (rc)
		return fail(object, rc, "stat", err);
	has_name = !os_stat(object->name, &named);
	if (now.st_size != then->st_size) {
		error_set(err, -ESTALE, "read", object->name, -1,
			  "it %s from %lld to %lld bytes while it was read",
			  now.st_size < then->st_size ? "shrank" : "grew",
			  (long long)then->st_size, (long long)now.st_size);
	} else if (!same_time(now.st_mtim, then->st_mtim) ||
		   (has_name && written_in_secret(then, &now, &named))) {
		error_set(err, -ESTALE, "read", object->name, -1,
			  "it was written to while it was read");
	} else if (object->keeps_name && has_name && !same_file(&named, &now)) {
		/* One that is gone is read to its end; one that has a successor is out of date. */
		error_set(err, -ESTALE, "read", object->name, -1,
			  "another file took its name while it was read");
	} else {
		return 0;
	}
	error_hint(err, "Read it again when nothing writes to it");
	return -ESTALE;
}

static int file_uncache(struct pen_object *object, struct pen_error *err)
{
	int rc;

	/* Dirty pages do not go away. */
	if (object->mode != PEN_READ && !object->committed) {
		rc = os_fdatasync(object->fd);
		if (rc)
			return fail(object, rc, "flush", err);
	}
	/* Advice: what stays cached does no harm. */
	os_uncache(object->fd);
	return 0;
}

static int flush_directory(struct pen_object *object, struct pen_error *err)
{
	struct file_state *state = object->state;
	int fd = os_open(state->directory, O_RDONLY | O_DIRECTORY, 0), rc;

	if (fd < 0)
		return fail(object, fd, "open the directory of", err);
	rc = os_fsync(fd);
	os_close(fd);
	/* Some file systems have no notion of it. */
	if (rc == -EINVAL || rc == -EROFS)
		rc = 0;
	if (!rc)
		return 0;
	fail(object, rc, "flush the directory of", err);
	error_hint(err, "The new file is in place, but might not survive a power loss");
	return rc;
}

/* What the file it replaces had: mode and, where we may, owner. */
static int inherit(struct pen_object *object, struct pen_error *err)
{
	struct file_state *state = object->state;
	struct stat old, new;
	int rc = os_stat(state->target, &old);

	if (rc)
		return rc == -ENOENT ? 0 : fail(object, rc, "stat", err);
	rc = os_fstat(object->fd, &new);
	if (rc)
		return fail(object, rc, "stat", err);
	if (old.st_uid != new.st_uid || old.st_gid != new.st_gid) {
		rc = os_chown(object->fd, old.st_uid, old.st_gid);
		/* Not ours to give away; keep the group at least. */
		if (rc == -EPERM)
			rc = os_chown(object->fd, (uid_t)-1, old.st_gid);
		if (rc && rc != -EPERM)
			return fail(object, rc, "keep the owner of", err);
	}
	/* After chown, which clears set-id bits. */
	rc = os_chmod(object->fd, old.st_mode & 07777);
	return rc ? fail(object, rc, "keep the mode of", err) : 0;
}

/* Give an unnamed file its temporary name. */
static int give_name(struct pen_object *object, struct pen_error *err)
{
	struct file_state *state = object->state;
	const char *base;
	int rc;

	if (state->temporary[0])
		return 0;
	name_temporary(state, &base);
	rc = os_link_fd(object->fd, state->temporary);
	if (!rc)
		return 0;
	state->temporary[0] = 0;
	return fail(object, rc, "name a file beside", err);
}

static int file_need_name(struct pen_object *object, struct pen_error *err)
{
	struct file_state *state = object->state;
	int rc;

	if (object->mode == PEN_READ || state->in_place || state->temporary[0])
		return 0;
	rc = give_name(object, err);
	if (rc || object->direct_fd < 0)
		return rc;
	/* A descriptor keeps the name it was opened by, so it has to be a new one. The old one
	 * stays open: another job may be using it. */
	rc = os_open(state->temporary, O_RDWR | O_DIRECT, 0);
	if (rc < 0)
		return fail(object, rc, "open a file beside", err);
	state->unnamed_fd = object->direct_fd;
	object->direct_fd = rc;
	return 0;
}

static int publish(struct pen_object *object, struct pen_error *err)
{
	struct file_state *state = object->state;
	int rc = give_name(object, err);

	if (rc)
		return rc;
	rc = os_rename(state->temporary, state->target);
	if (rc)
		return fail(object, rc, "rename into place", err);
	state->temporary[0] = 0;
	return 0;
}

static int file_commit(struct pen_object *object, struct pen_error *err)
{
	struct file_state *state = object->state;
	const char *base;
	int rc = 0;

	/* Committing again after the last step failed: only that step is missing. */
	if (state->renamed)
		return flush_directory(object, err);
	if (!state->in_place)
		rc = inherit(object, err);
	if (rc)
		return rc;
	rc = os_fdatasync(object->fd);
	/* A character device has nothing to flush. */
	if (rc == -EINVAL && state->in_place && !S_ISREG(state->opened.st_mode))
		rc = 0;
	if (rc)
		return fail(object, rc, "flush", err);
	if (!state->in_place) {
		rc = publish(object, err);
		state->renamed = !rc;
	} else if (state->created) {
		name_temporary(state, &base);
		state->temporary[0] = 0;
		state->created = false;
	} else {
		return 0;
	}
	return rc ? rc : flush_directory(object, err);
}

const struct object_ops object_file_ops = {
	.kind = "file",
	.open = file_open,
	.residency = file_residency,
	.unchanged = file_unchanged,
	.uncache = file_uncache,
	.need_name = file_need_name,
	.commit = file_commit,
	.close = file_close,
};
