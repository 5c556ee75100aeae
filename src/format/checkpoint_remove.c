/* SPDX-License-Identifier: MIT */
/*
 * Removing steps that are not wanted any more, and what a crash left. A step ends to exist when its
 * manifest is gone, durably; only then its files go, and its folder last. Whoever is stopped in
 * between leaves a folder without a manifest, which is swept.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "format/checkpoint.h"
#include "io/replace.h"
#include "sys/os.h"

/* ------------------------------------------------------------------- the folder of a step -- */

int checkpoint_open_step(const struct pen_checkpoints *folder, uint64_t step)
{
	char name[MANIFEST_STEP_NAME];

	manifest_step_name(step, name);
	return os_open(folder->fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
}

/* Some file systems have no notion of it. */
static int flush(int fd)
{
	int rc = os_fsync(fd);

	return rc == -EINVAL ? 0 : rc;
}

int checkpoint_unname(int step_fd)
{
	int rc = os_unlink(step_fd, MANIFEST);

	return rc == -ENOENT ? 0 : rc;
}

struct tidying {
	int fd;
	const struct pen_checkpoint *keep;
	struct checkpoint_told *told;
	int rc;				/* the first error */
};

static bool is_kept(const struct pen_checkpoint *keep, const char *name)
{
	uint32_t rank, turn;

	if (!keep)
		return false;
	if (!strcmp(name, MANIFEST))
		return true;
	return manifest_file_parse(name, &rank, &turn) && rank < keep->file_count &&
	       !strcmp(name, keep->files[rank].name);
}

/* Ours by its name, and a file of its own. */
static bool may_go(int fd, const char *name, struct stat *st)
{
	uint32_t rank, turn;

	return (manifest_file_parse(name, &rank, &turn) || leftover_is(name)) &&
	       !os_lstat(fd, name, st) && S_ISREG(st->st_mode);
}

static int tidy_name(const char *name, void *context)
{
	struct tidying *tidying = context;
	struct checkpoint_told *told = tidying->told;
	struct stat st;
	bool gone = false;
	int rc = 0;

	if (is_kept(tidying->keep, name))
		return 0;
	if (may_go(tidying->fd, name, &st)) {
		gone = told && told->dry;
		/* A temporary file may be one that is being written: whoever does has locked it. */
		if (!gone && leftover_is(name))
			gone = leftover_remove(tidying->fd, name);
		else if (!gone)
			gone = !(rc = os_unlink(tidying->fd, name)) || rc == -ENOENT;
		if (!gone && rc && !tidying->rc)
			tidying->rc = rc;
	}
	if (told && gone)
		told->removed(told, name, (uint64_t)st.st_size);
	else if (told)
		told->left(told, name);
	return 0;
}

int checkpoint_tidy(int step_fd, const struct pen_checkpoint *keep, struct checkpoint_told *told)
{
	struct tidying tidying = { .fd = step_fd, .keep = keep, .told = told };
	int rc = told && told->dry ? 0 : flush(step_fd);

	if (!rc)
		rc = os_list(step_fd, ".", tidy_name, &tidying);
	return rc ? rc : tidying.rc;
}

/* ---------------------------------------------------------------------------- what is told -- */

struct names {
	char **items;
	size_t count, room;
};

struct removal {
	struct pen_checkpoint_removal public;
	struct names removed, left;
	uint64_t *steps;
};

struct telling {
	struct checkpoint_told told;	/* first: it is what comes back */
	struct removal *removal;
	char step[MANIFEST_STEP_NAME];
	bool whole_folder;		/* it is told by its own name, if all of it goes */
	bool left;			/* something stays in this folder */
	int rc;				/* -ENOMEM */
};

static int add_name(struct names *names, const char *step, const char *name)
{
	size_t length = strlen(step) + (name ? strlen(name) + 1 : 0) + 1;

	if (names->count == names->room) {
		size_t room = names->room ? 2 * names->room : 16;
		char **grown = os_realloc(names->items, room, sizeof(grown[0]));

		if (!grown)
			return -ENOMEM;
		names->items = grown;
		names->room = room;
	}
	names->items[names->count] = os_calloc(length, 1);
	if (!names->items[names->count])
		return -ENOMEM;
	snprintf(names->items[names->count++], length, "%s%s%s", step, name ? "/" : "",
		 name ? name : "");
	return 0;
}

static void tell_removed(struct checkpoint_told *told, const char *name, uint64_t bytes)
{
	struct telling *telling = (struct telling *)told;

	telling->removal->public.bytes += bytes;
	if (!telling->whole_folder && !telling->rc)
		telling->rc = add_name(&telling->removal->removed, telling->step, name);
}

static void tell_left(struct checkpoint_told *told, const char *name)
{
	struct telling *telling = (struct telling *)told;

	uint32_t rank, turn;

	/* In a dry run the manifest is still there; and what others keep beside a step that exists
	 * is no leftover. */
	if (telling->whole_folder ? telling->told.dry && !strcmp(name, MANIFEST)
				  : !manifest_file_parse(name, &rank, &turn) && !leftover_is(name))
		return;
	telling->left = true;
	if (!telling->rc)
		telling->rc = add_name(&telling->removal->left, telling->step, name);
}

void pen_checkpoint_removal_free(struct pen_checkpoint_removal *public)
{
	struct removal *removal = (struct removal *)public;

	if (!removal)
		return;
	for (size_t i = 0; i < removal->removed.count; i++)
		free(removal->removed.items[i]);
	for (size_t i = 0; i < removal->left.count; i++)
		free(removal->left.items[i]);
	free(removal->removed.items);
	free(removal->left.items);
	free(removal->steps);
	free(removal);
}

static void publish(struct removal *removal, struct pen_checkpoint_removal **public)
{
	removal->public.steps = removal->steps;
	removal->public.removed = (const char *const *)removal->removed.items;
	removal->public.removed_count = removal->removed.count;
	removal->public.left = (const char *const *)removal->left.items;
	removal->public.left_count = removal->left.count;
	*public = &removal->public;
}

/* -------------------------------------------------------------------------------- removing -- */

/* What both do with a list of steps. */
struct run {
	struct pen_checkpoints *folder;
	struct pen_checkpoint_list *list;
	struct telling telling;
	bool changed;			/* names in the folder itself */
	struct pen_error *err;
};

/* All of a step's folder: its manifest, what is ours in it, and itself if nothing is left. */
static int remove_folder(struct run *run, uint64_t step)
{
	struct telling *telling = &run->telling;
	int fd = checkpoint_open_step(run->folder, step), rc = 0;

	/* Behind a link is another place, where nothing is ours. */
	if (fd == -ELOOP || fd == -ENOTDIR)
		return add_name(&telling->removal->left, telling->step, NULL);
	if (fd < 0)
		return fd;
	telling->whole_folder = true;
	telling->left = false;
	if (!telling->told.dry)
		rc = checkpoint_unname(fd);
	if (!rc)
		rc = checkpoint_tidy(fd, NULL, &telling->told);
	os_close(fd);
	if (rc || telling->left)
		return rc;
	rc = telling->told.dry ? 0 : os_rmdir(run->folder->fd, telling->step);
	run->changed = true;
	return rc ? rc : add_name(&telling->removal->removed, telling->step, NULL);
}

static int tidy_folder(struct run *run, const struct pen_checkpoint *step)
{
	int fd = checkpoint_open_step(run->folder, step->step), rc;

	if (fd < 0)
		return fd == -ELOOP || fd == -ENOTDIR ? 0 : fd;
	run->telling.whole_folder = false;
	rc = checkpoint_tidy(fd, step, &run->telling.told);
	os_close(fd);
	return rc;
}

static bool is_under_way(const struct run *run, const struct pen_checkpoint *step)
{
	return run->folder->begun && run->folder->step == step->step;
}

static int start(struct pen_checkpoints *folder, uint32_t flags, const char *operation,
		 struct run *run, struct pen_error *err)
{
	struct removal *removal;
	int rc = checkpoint_may_write(folder, operation, err);

	if (!rc && folder->rank)
		rc = error_set(err, -EINVAL, operation, folder->path, -1,
			       "that is for rank 0, not for rank %u", folder->rank);
	if (!rc && (flags & ~PEN_CHECKPOINT_DRY_RUN))
		rc = error_set(err, -EINVAL, operation, folder->path, -1, "%u is no flags", flags);
	*run = (struct run){ .folder = folder, .err = err };
	if (!rc)
		rc = pen_checkpoints_list(folder, &run->list, err);
	if (rc)
		return rc;
	removal = os_calloc(1, sizeof(*removal));
	if (removal)
		removal->steps = os_calloc(run->list->count + 1, sizeof(removal->steps[0]));
	run->telling = (struct telling){
		.told = { tell_removed, tell_left, flags & PEN_CHECKPOINT_DRY_RUN },
		.removal = removal,
	};
	return removal && removal->steps ? 0
					 : error_sys(err, -ENOMEM, operation, folder->path, -1);
}

/* `rc` is that of the step which is told of last. */
static int finish(struct run *run, int rc, const char *operation,
		  struct pen_checkpoint_removal **removal)
{
	int flushed = run->changed && !run->telling.told.dry ? flush(run->folder->fd) : 0;
	char path[PATH_MAX];

	snprintf(path, sizeof(path), "%s%s%s", run->folder->path, rc ? "/" : "",
		 rc ? run->telling.step : "");
	rc = rc ? rc : run->telling.rc ? run->telling.rc : flushed;
	pen_checkpoint_list_free(run->list);
	if (!rc) {
		publish(run->telling.removal, removal);
		return 0;
	}
	pen_checkpoint_removal_free(run->telling.removal ? &run->telling.removal->public : NULL);
	return error_sys(run->err, rc, operation, path, -1);
}

/* The place in the list of the oldest step that is kept; 0 where nothing goes. */
static size_t oldest_kept(const struct pen_checkpoint_list *list, uint32_t keep)
{
	for (size_t i = list->count; i > 0; i--)
		if (list->steps[i - 1].state == PEN_CHECKPOINT_WHOLE && !--keep)
			return i - 1;
	return 0;
}

int pen_checkpoints_gc(struct pen_checkpoints *folder, uint32_t keep, uint32_t flags,
		       struct pen_checkpoint_removal **removal, struct pen_error *err)
{
	static const char operation[] = "remove steps in";
	struct run run;
	size_t end;
	int rc;

	error_clear(err);
	*removal = NULL;
	if (!keep)
		return error_set(err, -EINVAL, operation, folder->path, -1,
				 "the last whole step is always kept");
	rc = start(folder, flags, operation, &run, err);
	if (rc) {
		pen_checkpoint_list_free(run.list);
		pen_checkpoint_removal_free((struct pen_checkpoint_removal *)run.telling.removal);
		return rc;
	}
	end = oldest_kept(run.list, keep);
	for (size_t i = 0; !rc && i < end; i++) {
		const struct pen_checkpoint *step = &run.list->steps[i];
		struct removal *told = run.telling.removal;

		if (step->state == PEN_CHECKPOINT_UNFINISHED || is_under_way(&run, step))
			continue;
		manifest_step_name(step->step, run.telling.step);
		rc = remove_folder(&run, step->step);
		if (!rc)
			told->steps[told->public.step_count++] = step->step;
	}
	return finish(&run, rc, operation, removal);
}

int pen_checkpoints_sweep(struct pen_checkpoints *folder, uint32_t flags,
			  struct pen_checkpoint_removal **removal, struct pen_error *err)
{
	static const char operation[] = "sweep";
	struct run run;
	int rc;

	error_clear(err);
	*removal = NULL;
	rc = start(folder, flags, operation, &run, err);
	if (rc) {
		pen_checkpoint_list_free(run.list);
		pen_checkpoint_removal_free((struct pen_checkpoint_removal *)run.telling.removal);
		return rc;
	}
	for (size_t i = 0; !rc && i < run.list->count; i++) {
		const struct pen_checkpoint *step = &run.list->steps[i];

		if (step->state == PEN_CHECKPOINT_DAMAGED || is_under_way(&run, step))
			continue;
		manifest_step_name(step->step, run.telling.step);
		/* Without a lock it may be somebody's who is at it. */
		if (folder->lock.fd < 0)
			rc = step->state == PEN_CHECKPOINT_UNFINISHED
				     ? add_name(&run.telling.removal->left, run.telling.step, NULL)
				     : 0;
		else
			rc = step->state == PEN_CHECKPOINT_UNFINISHED
				     ? remove_folder(&run, step->step) : tidy_folder(&run, step);
	}
	return finish(&run, rc, operation, removal);
}
