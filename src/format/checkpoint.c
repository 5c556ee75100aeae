/* SPDX-License-Identifier: MIT */
/* Folders of checkpoints, opened and looked at; see checkpoint.h. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "format/checkpoint.h"
#include "io/replace.h"
#include "sys/os.h"

/* A step may be replaced while it is looked at, and another come; so often in a row it is not. */
#define LOOKS_MAX 10

char *checkpoint_path(const struct pen_checkpoints *folder, uint64_t step, const char *name)
{
	char part[MANIFEST_STEP_NAME];
	size_t room = strlen(folder->path) + sizeof(part) + (name ? strlen(name) : 0) + 3;
	char *path = os_calloc(room, 1);

	manifest_step_name(step, part);
	if (path)
		snprintf(path, room, "%s/%s%s%s", folder->path, part, name ? "/" : "",
			 name ? name : "");
	return path;
}

/* ------------------------------------------------------------------------------- one step -- */

/* What is being looked at. */
struct look {
	const struct pen_checkpoints *folder;
	uint64_t step;
	char *path;			/* of its manifest, for messages */
	int fd;				/* of its folder */
	struct stat seen;		/* its manifest */
	struct pen_error *err;
};

static int read_manifest(struct look *look, int fd, struct pen_checkpoint **checkpoint)
{
	size_t length = (size_t)look->seen.st_size, done = 0;
	char *text = os_calloc(length + 1, 1);
	ssize_t n = 0;
	int rc;

	if (!text)
		return error_sys(look->err, -ENOMEM, "read", look->path, -1);
	while (done < length && (n = os_pread(fd, text + done, length - done, done)) > 0)
		done += (size_t)n;
	/* One that is shorter now is cut in the middle of its JSON. */
	rc = n < 0 ? error_sys(look->err, (int)n, "read", look->path, (int64_t)done)
		   : manifest_parse(look->path, text, done, look->step, checkpoint, look->err);
	free(text);
	return rc;
}

static int open_manifest(struct look *look)
{
	int fd = os_open(look->fd, MANIFEST, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0);
	int rc = fd < 0 ? fd : os_fstat(fd, &look->seen);

	if (rc == -ENOENT)
		return error_set(look->err, -ENODATA, "read", look->path, -1,
				 "it has no manifest: it is being written, or its writer was "
				 "stopped");
	if (rc < 0) {
		error_sys(look->err, rc, "read", look->path, -1);
	} else if (!S_ISREG(look->seen.st_mode) || look->seen.st_size > MANIFEST_SIZE_MAX) {
		rc = error_set(look->err, -EBADMSG, "read", look->path, -1,
			       S_ISREG(look->seen.st_mode) ? "the manifest is too large"
							   : "the manifest is no file");
	}
	if (rc < 0 && fd >= 0)
		os_close(fd);
	return rc < 0 ? rc : fd;
}

static int check_files(struct look *look, const struct pen_checkpoint *checkpoint)
{
	for (size_t i = 0; i < checkpoint->file_count; i++) {
		const struct pen_checkpoint_file *file = &checkpoint->files[i];
		struct stat st;
		int rc = os_stat(look->fd, file->name, &st);

		if (rc == -ENOENT)
			return error_set(look->err, -EBADMSG, "read", look->path, -1,
					 "its file %s is missing", file->name);
		if (rc)
			return error_sys(look->err, rc, "look at a file of", look->path, -1);
		if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size != file->bytes)
			return error_set(look->err, -EBADMSG, "read", look->path, -1,
					 "its file %s has %" PRIu64 " bytes, and should have %"
					 PRIu64, file->name, (uint64_t)st.st_size, file->bytes);
	}
	return 0;
}

static int look_inside(struct look *look, struct pen_checkpoint **checkpoint)
{
	int fd = open_manifest(look), rc;

	if (fd < 0)
		return fd;
	rc = read_manifest(look, fd, checkpoint);
	os_close(fd);
	if (!rc)
		rc = check_files(look, *checkpoint);
	if (rc) {
		free(*checkpoint);
		*checkpoint = NULL;
	}
	return rc;
}

/* Is the manifest another one by now, or gone? */
static bool has_changed(const struct look *look)
{
	struct stat now;
	int rc = os_lstat(look->fd, MANIFEST, &now);

	return rc == -ENOENT || (!rc && (now.st_ino != look->seen.st_ino ||
					 now.st_mtim.tv_sec != look->seen.st_mtim.tv_sec ||
					 now.st_mtim.tv_nsec != look->seen.st_mtim.tv_nsec));
}

static int look_once(struct look *look, struct pen_checkpoint **checkpoint, bool *again)
{
	char name[MANIFEST_STEP_NAME];
	int rc;

	manifest_step_name(look->step, name);
	look->fd = os_open(look->folder->fd, name, O_RDONLY | O_DIRECTORY, 0);
	if (look->fd == -ENOENT && checkpoint_folder_there(look->folder, "look into", look->err))
		return -ENOENT;
	if (look->fd == -ENOENT || look->fd == -ENOTDIR)
		return error_set(look->err, -ENOENT, "find", look->path, -1,
				 "there is no step %" PRIu64, look->step);
	if (look->fd < 0)
		return error_sys(look->err, look->fd, "open the folder of", look->path, -1);
	rc = look_inside(look, checkpoint);
	*again = rc == -EBADMSG && has_changed(look);
	os_close(look->fd);
	return rc;
}

int checkpoint_look(const struct pen_checkpoints *folder, uint64_t step,
		    struct pen_checkpoint **checkpoint, struct pen_error *err)
{
	struct pen_error unwanted;
	struct look look = { .folder = folder, .step = step, .err = err ? err : &unwanted,
			     .path = checkpoint_path(folder, step, MANIFEST) };
	bool again = true;
	int rc = look.path ? 0 : error_sys(err, -ENOMEM, "read", folder->path, -1);

	*checkpoint = NULL;
	for (int i = 0; look.path && i < LOOKS_MAX && again; i++) {
		again = false;
		rc = look_once(&look, checkpoint, &again);
	}
	free(look.path);
	return rc;
}

int pen_checkpoints_show(struct pen_checkpoints *folder, uint64_t step,
			 struct pen_checkpoint **checkpoint, struct pen_error *err)
{
	int rc;

	error_clear(err);
	rc = checkpoint_look(folder, step, checkpoint, err);
	if (rc == -ENOENT || rc == -ENODATA)
		error_hint(err, "'penstock ckpt list' shows which steps there are");
	if (rc == -EBADMSG)
		error_hint(err, MANIFEST_DAMAGED);
	if (rc == -ENODATA && err)
		err->code = -ENOENT;
	return rc == -ENODATA ? -ENOENT : rc;
}

void pen_checkpoint_free(struct pen_checkpoint *checkpoint)
{
	free(checkpoint);
}

/* ------------------------------------------------------------------------------- all steps -- */

struct steps {
	uint64_t *numbers;
	size_t count, room;
};

static int note_step(const char *name, void *context)
{
	struct steps *steps = context;
	uint64_t step;

	if (!manifest_step_parse(name, &step))
		return 0;
	if (steps->count == steps->room) {
		size_t room = steps->room ? 2 * steps->room : 64;
		uint64_t *grown = os_realloc(steps->numbers, room, sizeof(grown[0]));

		if (!grown)
			return -ENOMEM;
		steps->numbers = grown;
		steps->room = room;
	}
	steps->numbers[steps->count++] = step;
	return 0;
}

static int by_number(const void *left, const void *right)
{
	uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;

	return a < b ? -1 : a > b;
}

static int find_steps(const struct pen_checkpoints *folder, struct steps *steps,
		      struct pen_error *err)
{
	int rc = checkpoint_folder_there(folder, "list", err);

	if (rc)
		return rc;
	rc = os_list(folder->fd, ".", note_step, steps);
	if (rc)
		return error_sys(err, rc, "list", folder->path, -1);
	if (steps->count)
		qsort(steps->numbers, steps->count, sizeof(steps->numbers[0]), by_number);
	return 0;
}

/* Failures of ours say nothing about the step. */
static bool is_ours(int rc)
{
	return rc == -ENOMEM || rc == -EMFILE || rc == -ENFILE || rc == -EINTR;
}

/* A list owns what was made for each of its steps: the files and values in it lie there. */
struct list {
	struct pen_checkpoint_list public;
	struct pen_checkpoint *steps;
	struct pen_checkpoint *made[];
};

static int add_step(const struct pen_checkpoints *folder, uint64_t step, struct list *list,
		    struct pen_error *err)
{
	struct pen_checkpoint *entry = &list->steps[list->public.count];
	struct pen_error why;
	int rc = checkpoint_look(folder, step, &list->made[list->public.count], &why);

	if (rc == -ENOENT)
		return 0;
	if (is_ours(rc)) {
		if (err)
			*err = why;
		return rc;
	}
	if (rc) {
		entry->step = step;
		entry->state = rc == -ENODATA ? PEN_CHECKPOINT_UNFINISHED : PEN_CHECKPOINT_DAMAGED;
		text_copy(entry->problem, sizeof(entry->problem), why.message);
	} else {
		*entry = *list->made[list->public.count];
	}
	list->public.count++;
	return 0;
}

static int make_list(const struct pen_checkpoints *folder, const struct steps *steps,
		     struct list **made, struct pen_error *err)
{
	struct list *list = os_calloc(1, sizeof(*list) + steps->count * sizeof(list->made[0]));
	int rc = 0;

	if (list)
		list->steps = os_calloc(steps->count + 1, sizeof(list->steps[0]));
	if (!list || !list->steps)
		rc = error_sys(err, -ENOMEM, "list", folder->path, -1);
	for (size_t i = 0; !rc && i < steps->count; i++)
		rc = add_step(folder, steps->numbers[i], list, err);
	if (!rc)
		list->public.steps = list->steps;
	else
		pen_checkpoint_list_free(list ? &list->public : NULL);
	*made = rc ? NULL : list;
	return rc;
}

/*
 * While steps are looked at one by one, the last of them may go and a newer one have come: who then
 * saw none would be wrong, as there was one at every moment. Are there others now?
 */
static int have_changed(const struct pen_checkpoints *folder, struct steps *steps, bool *changed,
			struct pen_error *err)
{
	struct steps now = { .count = 0 };
	int rc = find_steps(folder, &now, err);

	*changed = !rc && (now.count != steps->count ||
			   (now.count && memcmp(now.numbers, steps->numbers,
						now.count * sizeof(now.numbers[0]))));
	free(steps->numbers);
	*steps = now;
	return rc;
}

int pen_checkpoints_list(struct pen_checkpoints *folder, struct pen_checkpoint_list **public,
			 struct pen_error *err)
{
	struct steps steps = { .count = 0 };
	struct list *list = NULL;
	bool changed = true;
	int rc;

	error_clear(err);
	*public = NULL;
	rc = find_steps(folder, &steps, err);
	for (int i = 0; !rc && changed && i < LOOKS_MAX; i++) {
		pen_checkpoint_list_free(list ? &list->public : NULL);
		rc = make_list(folder, &steps, &list, err);
		if (!rc)
			rc = have_changed(folder, &steps, &changed, err);
	}
	free(steps.numbers);
	if (rc)
		pen_checkpoint_list_free(list ? &list->public : NULL);
	else
		*public = &list->public;
	return rc;
}

void pen_checkpoint_list_free(struct pen_checkpoint_list *public)
{
	struct list *list = (struct list *)public;

	if (!list)
		return;
	for (size_t i = 0; i < list->public.count; i++)
		free(list->made[i]);
	free(list->steps);
	free(list);
}

/* From the last on: only one has to be looked at, mostly. */
static int find_latest(const struct pen_checkpoints *folder, const struct steps *steps,
		       struct pen_checkpoint **latest, struct pen_error *err)
{
	int rc = 0;

	for (size_t i = steps->count; !rc && !*latest && i > 0; i--) {
		rc = checkpoint_look(folder, steps->numbers[i - 1], latest, err);
		rc = is_ours(rc) ? rc : 0;
	}
	return rc;
}

int pen_checkpoints_latest(struct pen_checkpoints *folder, uint64_t *step, struct pen_error *err)
{
	struct steps steps = { .count = 0 };
	struct pen_checkpoint *latest = NULL;
	bool changed = true;
	int rc;

	error_clear(err);
	rc = find_steps(folder, &steps, err);
	for (int i = 0; !rc && !latest && changed && i < LOOKS_MAX; i++) {
		rc = find_latest(folder, &steps, &latest, err);
		if (!rc && !latest)
			rc = have_changed(folder, &steps, &changed, err);
	}
	if (latest) {
		error_clear(err);
		*step = latest->step;
	} else if (!rc) {
		rc = error_set(err, -ENOENT, "find a checkpoint in", folder->path, -1,
			       steps.count ? "none of its %zu steps is whole" : "there is none",
			       steps.count);
		if (steps.count)
			error_hint(err, "'penstock ckpt list' says why");
	}
	free(latest);
	free(steps.numbers);
	return rc;
}

/* ------------------------------------------------------------------------- open and close -- */

/* Make the name of a folder durable in the one above it. */
static int flush_above(const char *path, int fd)
{
	struct place place;
	int rc = place_find(AT_FDCWD, path, &place);

	/* The root has none above it. */
	if (rc)
		return rc == -EISDIR ? 0 : rc;
	rc = place_flush(&place, fd);
	place_leave(&place);
	return rc;
}

/* With those above it, each durable before the next is made in it; `path` is changed meanwhile. */
static int make_folders(char *path)
{
	char *slash = strrchr(path, '/');
	int rc = os_mkdir(AT_FDCWD, path, 0777), fd;

	if (rc == -ENOENT && slash && slash > path) {
		*slash = 0;
		rc = make_folders(path);
		*slash = '/';
		rc = rc && rc != -EEXIST ? rc : os_mkdir(AT_FDCWD, path, 0777);
	}
	if (rc)
		return rc == -EEXIST ? 0 : rc;
	fd = os_open(AT_FDCWD, path, O_RDONLY | O_DIRECTORY, 0);
	if (fd < 0)
		return fd;
	rc = flush_above(path, fd);
	os_close(fd);
	return rc;
}

static int open_folder(struct pen_checkpoints *folder, const char *name, struct pen_error *err)
{
	char path[PATH_MAX];
	size_t length = strlen(name);
	int rc = 0;

	while (length > 1 && name[length - 1] == '/')
		length--;
	if (!length || length >= sizeof(path))
		return error_sys(err, length ? -ENAMETOOLONG : -ENOENT, "open", name, -1);
	memcpy(path, name, length);
	path[length] = 0;
	if (folder->mode == PEN_WRITE)
		rc = make_folders(path);
	if (rc)
		return error_sys(err, rc, "create", name, -1);
	folder->fd = os_open(AT_FDCWD, path, O_RDONLY | O_DIRECTORY, 0);
	if (folder->fd < 0)
		return error_sys(err, folder->fd, "open", name, -1);
	/* It may have been made by a writer that was killed before it could flush. */
	if (folder->mode == PEN_WRITE)
		rc = flush_above(path, folder->fd);
	if (rc)
		return error_sys(err, rc, "flush the folder above", name, -1);
	/* Whole, as the process may go elsewhere. */
	rc = os_realpath(name, path);
	if (rc)
		return error_sys(err, rc, "open", name, -1);
	folder->path = os_calloc(strlen(path) + 1, 1);
	if (!folder->path)
		return error_sys(err, -ENOMEM, "open", name, -1);
	strcpy(folder->path, path);
	return 0;
}

int pen_checkpoints_open(const char *path, enum pen_mode mode, uint32_t rank,
			 struct pen_checkpoints **opened, struct pen_error *err)
{
	struct pen_checkpoints *folder;
	int rc;

	error_clear(err);
	*opened = NULL;
	if (mode != PEN_READ && mode != PEN_WRITE)
		return error_set(err, -EINVAL, "open", path, -1,
				 "a folder of checkpoints is opened to read or to write");
	if (rank >= MANIFEST_RANKS_MAX)
		return error_set(err, -EINVAL, "open", path, -1, "ranks are below %u",
				 MANIFEST_RANKS_MAX);
	folder = os_calloc(1, sizeof(*folder));
	if (!folder)
		return error_sys(err, -ENOMEM, "open", path, -1);
	folder->fd = folder->lock.fd = -1;
	folder->mode = mode;
	folder->rank = rank;
	folder->generation = os_generation();
	rc = open_folder(folder, path, err);
	if (!rc && mode == PEN_WRITE && !rank)
		rc = checkpoint_lock_take(folder, err);
	if (rc)
		pen_checkpoints_close(folder);
	else
		*opened = folder;
	return rc;
}

void pen_checkpoints_close(struct pen_checkpoints *folder)
{
	if (!folder)
		return;
	if (folder->begun && folder->generation == os_generation())
		pen_checkpoints_abandon(folder, NULL);
	checkpoint_lock_drop(folder);
	if (folder->fd >= 0)
		os_close(folder->fd);
	free(folder->file);
	free(folder->path);
	free(folder);
}

const char *pen_checkpoints_path(const struct pen_checkpoints *folder)
{
	return folder->path;
}

const char *pen_checkpoints_warning(const struct pen_checkpoints *folder)
{
	return folder->warning;
}

int checkpoint_folder_there(const struct pen_checkpoints *folder, const char *operation,
			    struct pen_error *err)
{
	struct stat own, now;
	int rc = os_fstat(folder->fd, &own);

	if (!rc)
		rc = os_stat(AT_FDCWD, folder->path, &now);
	if (rc && rc != -ENOENT && rc != -ENOTDIR)
		return error_sys(err, rc, operation, folder->path, -1);
	if (!rc && own.st_dev == now.st_dev && own.st_ino == now.st_ino)
		return 0;
	error_set(err, -ENOENT, operation, folder->path, -1, rc
		  ? "the folder was removed or renamed after it was opened"
		  : "another folder is in the place of the one that was opened");
	error_hint(err, "Close it, and open it anew where it is now; opening to write makes it if "
			"it is gone");
	return -ENOENT;
}

int checkpoint_may_write(const struct pen_checkpoints *folder, const char *operation,
			 struct pen_error *err)
{
	if (folder->mode != PEN_WRITE)
		return error_set(err, -EBADF, operation, folder->path, -1,
				 "it was opened for reading");
	if (folder->generation == os_generation())
		return 0;
	error_set(err, -ECHILD, operation, folder->path, -1,
		  "it was opened by the process that this one was forked from");
	error_hint(err, "Open it anew, when that one has closed it");
	return -ECHILD;
}
