/* SPDX-License-Identifier: MIT */
/*
 * A file as an object. For reading it has two descriptors, one buffered and one O_DIRECT where the
 * file system allows. For writing, the bytes go to a file beside the target that has no name yet:
 *
 *   open: O_TMPFILE, space reserved
 *   commit: flushed, given the target's rights, and flushed again with these
 *           -> linked into a place that is free
 *           -> or given a temporary name, and renamed over the target
 *           -> directory flushed
 *   close without commit: the kernel frees the unnamed file, also after kill -9
 *
 * Where O_TMPFILE is not to be had the file has its temporary name from the start, and close
 * removes it; after kill -9, the next writer in that folder does (replace.h).
 *
 * Invariants
 *   1. The target's bytes, rights and name do not change before commit's link or rename, and an
 *      error before it leaves the target as it was.
 *   2. The descriptors refer to the same file until close.
 *   3. Things that are not regular files (devices, pipes' cousins like /dev/null) are written in
 *      place: there is nothing to rename.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>
#include "base/error.h"
#include "base/text.h"
#include "io/object.h"
#include "io/replace.h"
#include "sys/os.h"

/* Others may replace the target while it is looked for; so often is no chance any more. */
#define FINDS_TRIED 20

struct file_state {
	struct stat opened;		/* as it was at open */
	int start;			/* what a relative name starts at, read; -1: ours is none */
	struct replacement new;		/* the target's place, and the name of what will be there */
	int (*residency)(int fd, uint64_t offset, uint64_t length, uint64_t *pages);
	int residency_fd;
	int unnamed_fd;			/* direct, from before the file had a name; -1: none */
	bool published;			/* the target is the new file already */
	bool spoilt;			/* a flush failed: see refuse_flush() */
	bool in_place;
	bool created; /* in place, and the file is new: removed if never committed */
	unsigned int generation;	/* os_generation() of the process that opened it */
};

/* What the name of one that is read starts at; where the process is may have changed by now. */
static int start_of(const struct pen_object *object)
{
	const struct file_state *state = object->state;

	return state->start < 0 ? object->start : state->start;
}

static bool same_file(const struct stat *a, const struct stat *b)
{
	return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

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
	case -EBUSY:
		error_hint(err, "It may be mounted by itself, as containers do: write in place");
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

/*
 * The same file once more, with other flags. Where there is no /proc it goes by its name, which
 * must still lead to it.
 */
static int reopen(struct pen_object *object, int flags)
{
	struct file_state *state = object->state;
	bool reads = object->mode == PEN_READ, named = state->new.temporary[0];
	int fd = os_reopen(object->fd, flags);
	struct stat own, other;

	if (fd != -ENOENT || (!reads && !named))
		return fd;
	fd = reads ? os_open(start_of(object), object->name, flags | O_NONBLOCK, 0)
		   : os_open(state->new.place.directory, state->new.temporary, flags, 0);
	if (fd < 0)
		return fd;
	if (!os_fstat(object->fd, &own) && !os_fstat(fd, &other) && same_file(&own, &other))
		return fd;
	os_close(fd);
	return -ENOENT;
}

/* Open the O_DIRECT descriptor and learn its alignment; where that fails, keep the reason. */
static void open_direct(struct pen_object *object, int flags)
{
	struct object_info *info = &object->info;
	uint32_t memory = 0, offset = 0;
	int fd, rc;

	/* Newer kernels allow O_DIRECT there, but there is nothing to go around. */
	if (!strcmp(info->filesystem, "tmpfs") || !strcmp(info->filesystem, "ramfs")) {
		snprintf(info->no_direct, sizeof(info->no_direct), "%s is the page cache itself",
			 info->filesystem);
		return;
	}
	fd = reopen(object, flags | O_DIRECT);
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
	int rc = os_cachestat(object->fd, 0, os_page_size(), &pages);

	state->residency_fd = object->fd;
	if (!rc) {
		state->residency = os_cachestat;
	} else if (rc == -ENOSYS && !os_may_write(start_of(object), object->name)) {
		state->residency = os_mincore;
	} else {
		/* A descriptor of its own, so that a look fetches one page and no more. */
		rc = reopen(object, O_RDONLY);
		if (rc >= 0) {
			state->residency_fd = rc;
			state->residency = os_random(rc) ? NULL : os_cached_sample;
		}
		object->info.has_residency = state->residency != NULL;
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
	int rc = 0;

	/* The name is needed again later, when the process may have gone elsewhere. */
	if (object->start == AT_FDCWD && object->name[0] != '/')
		state->start = rc = os_open(AT_FDCWD, ".", O_PATH | O_DIRECTORY, 0);
	if (rc >= 0)
		rc = os_open(start_of(object), object->name, O_RDONLY | O_NONBLOCK, 0);
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

/* In directories like /tmp a file that others may write to is not theirs to replace. */
static int check_sticky(struct pen_object *object, struct pen_error *err)
{
	struct file_state *state = object->state;
	struct stat directory;
	int rc = os_fstat(state->new.place.directory, &directory);

	if (rc)
		return fail(object, rc, "stat the directory of", err);
	if (os_may_replace(&state->opened, &directory))
		return 0;
	error_set(err, -EPERM, "replace", object->name, -1,
		  "it belongs to another user, and in its directory only owners may replace files");
	error_hint(err, "Write in place, which is allowed, or under another name");
	return -EPERM;
}

static int open_beside(struct pen_object *object, bool exists, struct pen_error *err)
{
	struct replacement *new = &((struct file_state *)object->state)->new;
	/* Replacing needs only the directory's leave, but who protects a file means it. */
	int fd = exists ? os_may_write(new->place.directory, new->place.base) : 0;
	const char *step = "replace";

	if (fd < 0)
		return fail(object, fd, step, err);
	fd = exists ? check_sticky(object, err) : 0;
	if (fd)
		return fd;
	fd = replacement_create(new, &step);
	if (fd < 0)
		return fail(object, fd, step, err);
	object->fd = fd;
	return 0;
}

static int open_in_place(struct pen_object *object, bool exists, struct pen_error *err)
{
	struct file_state *state = object->state;
	struct place *place = &state->new.place;
	int fd = exists ? os_open(object->start, object->name, O_RDWR, 0)
			: os_open(place->directory, place->base, O_RDWR | O_CREAT | O_EXCL, 0666);

	if (fd == -EACCES && exists)
		fd = os_open(object->start, object->name, O_WRONLY, 0);
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

/* The place of a file that shall be replaced or made; 1 if what is there is another one. */
static int find_place(struct pen_object *object, bool exists, struct pen_error *err)
{
	struct file_state *state = object->state;
	struct place *place = &state->new.place;
	struct stat found;
	int rc = place_find(object->start, object->name, place);

	if (rc)
		return fail(object, rc, exists ? "resolve" : "create", err);
	if (!exists)
		return 0;
	rc = os_lstat(place->directory, place->base, &found);
	if (!rc && same_file(&found, &state->opened))
		return 0;
	place_leave(place);
	return rc && rc != -ENOENT ? fail(object, rc, "stat", err) : 1;
}

/* Links of /proc lead to files that no name leads to. */
static int refuse_nameless(struct pen_object *object, struct pen_error *err)
{
	error_set(err, -ENOENT, "resolve", object->name, -1,
		  "the file that it leads to is not to be found by a name of its own");
	error_hint(err, "Name the file itself, or write in place");
	return -ENOENT;
}

static int open_target_once(struct pen_object *object, struct pen_error *err)
{
	struct file_state *state = object->state;
	bool exists, in_place;
	int rc = os_stat(object->start, object->name, &state->opened);

	exists = !rc;
	if (rc == -ENOENT && object->name[strlen(object->name) - 1] == '/')
		return fail(object, -EISDIR, "create", err);
	if (rc && rc != -ENOENT)
		return fail(object, rc, "stat", err);
	if (exists)
		rc = check_kind(object, &state->opened, err);
	if (exists && rc)
		return rc;
	in_place = object->mode == PEN_WRITE_IN_PLACE ||
		   (exists && !S_ISREG(state->opened.st_mode));
	rc = exists && in_place ? 0 : find_place(object, exists, err);
	if (rc)
		return rc;
	return in_place ? open_in_place(object, exists, err) : open_beside(object, exists, err);
}

static int open_target(struct pen_object *object, struct pen_error *err)
{
	int rc = 1;

	for (int i = 0; i < FINDS_TRIED && rc == 1; i++)
		rc = open_target_once(object, err);
	return rc == 1 ? refuse_nameless(object, err) : rc;
}

static int open_for_writing(struct pen_object *object, struct pen_error *err)
{
	struct stat st;
	int rc = open_target(object, err);

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
		replacement_drop(&state->new);
		/* Somebody may have put another file there since. */
		if (state->created && !state->published &&
		    leftover_has_name(state->new.place.directory, state->new.place.base,
				      object->fd))
			os_unlink(state->new.place.directory, state->new.place.base);
	}
	place_leave(&state->new.place);
	if (state->start >= 0)
		os_close(state->start);
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
	struct file_state *state = os_calloc(1, sizeof(*state));
	int rc;

	if (!state)
		return error_sys(err, -ENOMEM, "open", object->name, -1);
	state->start = state->new.place.directory = state->residency_fd = state->unnamed_fd = -1;
	state->generation = os_generation();
	object->state = state;
	rc = object->mode == PEN_READ ? open_for_reading(object, err)
				      : open_for_writing(object, err);
	if (rc)
		file_close(object);
	return rc;
}

static int file_read(struct pen_object *object, void *buffer, size_t length, uint64_t offset,
		     struct pen_error *err)
{
	size_t done = 0;

	while (done < length) {
		ssize_t n = os_pread(object->fd, (char *)buffer + done, length - done,
				     offset + done);

		if (n == -EINTR)
			continue;
		if (n < 0)
			return error_sys(err, (int)n, "read", object->name,
					 (int64_t)(offset + done));
		if (!n) {
			error_set(err, -ESTALE, "read", object->name, (int64_t)(offset + done),
				  "the file became shorter while it was read");
			error_hint(err, "Wait until whatever writes it is done, and try again");
			return -ESTALE;
		}
		done += (size_t)n;
	}
	return 0;
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

static void file_fetch(struct pen_object *object, uint64_t offset, uint64_t length)
{
	os_fetch(object->fd, offset, length);
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
	has_name = !os_stat(start_of(object), object->name, &named);
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

/*
 * After a flush that failed the kernel may take pages for clean that never reached the disk, and
 * call the next flush a success: so there is no next one, of the bytes or of the directory. The
 * bytes have to be written again, to another file.
 */
static int refuse_flush(const struct pen_object *object, struct pen_error *err)
{
	const struct file_state *state = object->state;

	if (!state->spoilt)
		return 0;
	error_set(err, -EIO, "flush", object->name, -1,
		  "an attempt to make it durable failed before, and what was lost is not known");
	error_hint(err, "Open it again and write all of it anew");
	return -EIO;
}

/* Make the bytes durable. */
static int flush(struct pen_object *object, struct pen_error *err)
{
	struct file_state *state = object->state;
	int rc = refuse_flush(object, err);

	if (rc)
		return rc;
	rc = os_fdatasync(object->fd);
	/* A character device has nothing to flush. */
	if (rc == -EINVAL && state->in_place && !S_ISREG(state->opened.st_mode))
		return 0;
	state->spoilt = rc;
	return rc ? fail(object, rc, "flush", err) : 0;
}

static int file_flush(struct pen_object *object, struct pen_error *err)
{
	return object->mode == PEN_READ ? 0 : flush(object, err);
}

static int file_uncache(struct pen_object *object, struct pen_error *err)
{
	int rc;

	/* Dirty pages do not go away. */
	if (object->mode != PEN_READ && !object->committed) {
		rc = flush(object, err);
		if (rc)
			return rc;
	}
	/* Advice: what stays cached does no harm. */
	os_uncache(object->fd);
	return 0;
}

static int flush_directory(struct pen_object *object, struct pen_error *err)
{
	struct file_state *state = object->state;
	int rc = refuse_flush(object, err);

	if (rc)
		return rc;
	rc = place_flush(&state->new.place, object->fd);
	state->spoilt = rc;
	if (!rc)
		return 0;
	/* Not fail(), whose hints are for what happens before: the target has changed. */
	error_sys(err, rc, "flush the directory of", object->name, -1);
	error_hint(err, "The new file is in place, but might not survive a power loss");
	return rc;
}

static int file_need_name(struct pen_object *object, struct pen_error *err)
{
	struct file_state *state = object->state;
	const char *step;
	int rc;

	if (object->mode == PEN_READ || state->in_place || state->new.temporary[0])
		return 0;
	rc = replacement_name(&state->new, object->fd, &step);
	if (rc)
		return fail(object, rc, step, err);
	if (object->direct_fd < 0)
		return 0;
	/* A descriptor keeps the name it was opened by, so it has to be a new one. The old one
	 * stays open: another job may be using it. */
	rc = os_open(state->new.place.directory, state->new.temporary, O_RDWR | O_DIRECT, 0);
	if (rc < 0)
		return fail(object, rc, "open a file beside", err);
	state->unnamed_fd = object->direct_fd;
	object->direct_fd = rc;
	return 0;
}

static int commit_in_place(struct pen_object *object, struct pen_error *err)
{
	struct file_state *state = object->state;
	int rc = state->published ? 0 : flush(object, err);

	if (rc || !state->created)
		return rc;
	state->published = true;
	return flush_directory(object, err);
}

static int file_commit(struct pen_object *object, struct pen_error *err)
{
	struct file_state *state = object->state;
	const char *step;
	int rc;

	if (state->generation != os_generation()) {
		error_set(err, -ECHILD, "commit", object->name, -1,
			  "it was opened before this process was forked, and is its parent's");
		error_hint(err, "Commit it in the process that opened it");
		return -ECHILD;
	}
	if (state->in_place)
		return commit_in_place(object, err);
	/* Of one that is in place and not committed the last step has failed. */
	if (!state->published) {
		/* First, since it takes long: the target's rights may change meanwhile, and a
		 * temporary name must not lead others to what is not complete. */
		rc = flush(object, err);
		if (rc)
			return rc;
		rc = replacement_publish(&state->new, object->fd, &step);
		/* It flushes too, with the rights. */
		state->spoilt = rc;
		if (rc)
			return fail(object, rc, step, err);
		state->published = true;
	}
	return flush_directory(object, err);
}

const struct object_ops object_file_ops = {
	.kind = "file",
	.transport = TRANSPORT_FILE,
	.open = file_open,
	.read = file_read,
	.residency = file_residency,
	.fetch = file_fetch,
	.unchanged = file_unchanged,
	.uncache = file_uncache,
	.need_name = file_need_name,
	.flush = file_flush,
	.commit = file_commit,
	.close = file_close,
};
