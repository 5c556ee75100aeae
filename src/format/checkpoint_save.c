/* SPDX-License-Identifier: MIT */
/*
 * Saving a step: begin, (each rank writes its file,) describe, commit or abandon.
 *
 *	       begin                      commit
 *	none ---------> begun, no manifest ------> whole            files of turn 0
 *	whole --------> whole, new files   ------> whole, the new   files of the next turn
 *	       <--------
 *	        abandon
 *
 * The turn is a number in the names of files: those of a step that is replaced differ from those
 * that replace it, and all ranks find the same one, from the manifest that is there until the
 * commit.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "format/checkpoint.h"
#include "format/folder.h"
#include "sys/os.h"

/* ----------------------------------------------------------------------------------- begin -- */

static int check_begin(const struct pen_checkpoints *folder, uint64_t step, uint32_t world_size,
		       uint32_t flags, struct pen_error *err)
{
	int rc = checkpoint_may_write(folder, "begin a step in", err);

	if (rc)
		return rc;
	if (folder->begun)
		return error_set(err, -EALREADY, "begin a step in", folder->path, -1,
				 "step %" PRIu64 " was begun, and neither committed nor abandoned",
				 folder->step);
	if (step > MANIFEST_NUMBER_MAX || (flags & ~PEN_CHECKPOINT_OVERWRITE))
		return error_set(err, -EINVAL, "begin a step in", folder->path, -1,
				 "%" PRIu64 " is no step, or %" PRIu32 " no flags", step, flags);
	if (world_size > MANIFEST_RANKS_MAX || folder->rank >= world_size)
		return error_set(err, -EINVAL, "begin a step in", folder->path, -1,
				 "rank %" PRIu32 " is none of %" PRIu32 " (%u at most)",
				 folder->rank, world_size, MANIFEST_RANKS_MAX);
	return checkpoint_folder_there(folder, "begin a step in", err);
}

/* One more than the largest of the step that is there. */
static uint32_t next_turn(const struct pen_checkpoint *old)
{
	uint32_t most = 0, rank, turn;

	for (size_t i = 0; i < old->file_count; i++)
		if (manifest_file_parse(old->files[i].name, &rank, &turn) && turn > most)
			most = turn;
	return most + 1;
}

static int exists(const struct pen_checkpoints *folder, uint64_t step, struct pen_error *err)
{
	error_set(err, -EEXIST, "begin a step in", folder->path, -1, "step %" PRIu64 " exists",
		  step);
	error_hint(err, "Save another step, or ask for this one to be overwritten");
	return -EEXIST;
}

/* What the step is before it is saved. A damaged one is as good as none, where it may go. */
static int look_before(struct pen_checkpoints *folder, uint64_t step, bool overwrite,
		       struct pen_checkpoint **old, struct pen_error *err)
{
	int rc = checkpoint_look(folder, step, old, err), fd;

	if ((!rc || rc == -EBADMSG) && !overwrite)
		return exists(folder, step, err);
	if (rc == -EBADMSG && !folder->rank) {
		fd = checkpoint_open_step(folder, step);
		rc = fd < 0 ? fd : checkpoint_unname(fd);
		if (fd >= 0)
			os_close(fd);
		if (rc)
			return error_sys(err, rc, "remove the damaged step in", folder->path, -1);
	}
	if (rc == -ENOENT && folder->rank) {
		error_hint(err, "Rank 0 begins a step before the others; do they see the same "
				"folder?");
		return rc;
	}
	if (rc && rc != -ENOENT && rc != -ENODATA)
		return rc;
	error_clear(err);
	return 0;
}

/* By rank 0: a folder that holds nothing but what `old` names, and that is durable. */
static int prepare_folder(struct pen_checkpoints *folder, uint64_t step,
			  const struct pen_checkpoint *old, struct pen_error *err)
{
	char name[MANIFEST_STEP_NAME];
	int fd, rc;

	manifest_step_name(step, name);
	rc = os_mkdir(folder->fd, name, 0777);
	if (rc && rc != -EEXIST)
		return error_sys(err, rc, "create a folder in", folder->path, -1);
	fd = checkpoint_open_step(folder, step);
	if (fd < 0)
		return error_sys(err, fd, "open a folder in", folder->path, -1);
	rc = checkpoint_tidy(fd, old, NULL);
	os_close(fd);
	if (!rc)
		rc = os_fsync(folder->fd);
	/* Some file systems have no notion of it. */
	return rc && rc != -EINVAL ? error_sys(err, rc, "prepare a folder in", folder->path, -1)
				   : 0;
}

int pen_checkpoints_begin(struct pen_checkpoints *folder, uint64_t step, uint32_t world_size,
			  uint32_t flags, const char **path, struct pen_error *err)
{
	struct pen_checkpoint *old = NULL;
	char name[32];
	int rc;

	error_clear(err);
	rc = check_begin(folder, step, world_size, flags, err);
	if (!rc)
		rc = look_before(folder, step, flags & PEN_CHECKPOINT_OVERWRITE, &old, err);
	if (!rc && !folder->rank)
		rc = prepare_folder(folder, step, old, err);
	if (!rc) {
		folder->fresh = !old;
		folder->turn = old ? next_turn(old) : 0;
		manifest_file_name(folder->rank, folder->turn, name);
		free(folder->file);
		folder->file = checkpoint_path(folder, step, name);
		if (!folder->file)
			rc = error_sys(err, -ENOMEM, "begin a step in", folder->path, -1);
	}
	free(old);
	if (rc)
		return rc;
	folder->begun = true;
	folder->step = step;
	folder->world_size = world_size;
	*path = folder->file;
	return 0;
}

static int check_begun(const struct pen_checkpoints *folder, const char *operation, bool first,
		       struct pen_error *err)
{
	int rc = checkpoint_may_write(folder, operation, err);

	if (!rc && !folder->begun)
		rc = error_set(err, -EINVAL, operation, folder->path, -1, "no step was begun");
	if (!rc && first && folder->rank)
		rc = error_set(err, -EINVAL, operation, folder->path, -1,
			       "that is for rank 0, not for rank %" PRIu32, folder->rank);
	return rc;
}

int pen_checkpoints_describe(struct pen_checkpoints *folder, struct pen_checkpoint_file *file,
			     struct pen_error *err)
{
	int rc;

	error_clear(err);
	rc = check_begun(folder, "describe a file in", false, err);
	return rc ? rc : checkpoint_describe(folder->file, true, file, err);
}

/* ---------------------------------------------------------------------------------- commit -- */

/* The file that a rank should have written is there, and is the one that it has described. */
static int check_file(const struct pen_checkpoints *folder, uint32_t rank,
		      const struct pen_checkpoint_file *said, struct pen_error *err)
{
	struct pen_checkpoint_file is;
	char name[32], *path;
	int rc;

	manifest_file_name(rank, folder->turn, name);
	if (strncmp(said->name, name, sizeof(name)))
		return error_set(err, -EINVAL, "commit a step in", folder->path, -1,
				 "file %" PRIu32 " should be %s, not \"%.31s\"", rank, name,
				 said->name);
	path = checkpoint_path(folder, folder->step, name);
	if (!path)
		return error_sys(err, -ENOMEM, "commit a step in", folder->path, -1);
	rc = checkpoint_describe(path, false, &is, err);
	if (!rc && (is.bytes != said->bytes || strncmp(is.digest, said->digest, sizeof(is.digest))))
		rc = error_set(err, -ESTALE, "commit", path, -1, "it is not the file that rank %"
			       PRIu32 " has described", rank);
	free(path);
	return rc;
}

static int check_commit(const struct pen_checkpoints *folder,
			const struct pen_checkpoint_file *files, size_t count,
			struct pen_error *err)
{
	int rc = check_begun(folder, "commit a step in", true, err);

	if (!rc && count != folder->world_size)
		return error_set(err, -EINVAL, "commit a step in", folder->path, -1,
				 "there are %zu files for %" PRIu32 " ranks", count,
				 folder->world_size);
	for (size_t i = 0; !rc && i < count; i++)
		rc = check_file(folder, (uint32_t)i, &files[i], err);
	return rc;
}

/* All names that the manifest will have are durable before it is there. */
static int write_manifest(struct pen_checkpoints *folder, const char *text, size_t size,
			  struct pen_error *err)
{
	char *path = checkpoint_path(folder, folder->step, NULL);
	int fd = checkpoint_open_step(folder, folder->step), rc;

	if (!path || fd < 0) {
		rc = fd == -ENOENT ? checkpoint_folder_there(folder, "commit a step in", err) : 0;
		if (!rc)
			rc = error_sys(err, path ? fd : -ENOMEM, "commit a step in", folder->path,
				       -1);
	} else {
		rc = os_fsync(fd);
		rc = rc && rc != -EINVAL ? error_sys(err, rc, "flush", path, -1)
					 : folder_write(&(struct folder){ .path = path }, MANIFEST,
							text, size, err);
	}
	if (fd >= 0)
		os_close(fd);
	free(path);
	return rc;
}

/* What the step was before; what cannot be removed now is swept later. */
static void remove_old(const struct pen_checkpoints *folder, const struct pen_checkpoint *new)
{
	int fd = folder->fresh ? -ENOENT : checkpoint_open_step(folder, folder->step);

	if (fd < 0)
		return;
	checkpoint_tidy(fd, new, NULL);
	os_close(fd);
}

int pen_checkpoints_commit(struct pen_checkpoints *folder,
			   const struct pen_checkpoint_file *files, size_t count, const char *user,
			   struct pen_error *err)
{
	struct pen_checkpoint new = {
		.step = folder->step, .world_size = folder->world_size, .files = files,
		.file_count = count, .user = user ? user : "{}",
	};
	char *text = NULL;
	size_t size;
	int rc;

	error_clear(err);
	new.user_length = strlen(new.user);
	manifest_time(os_date(), new.time);
	rc = check_commit(folder, files, count, err);
	if (!rc)
		rc = manifest_write(&new, &text, &size, err);
	if (!rc)
		rc = write_manifest(folder, text, size, err);
	free(text);
	if (rc)
		return rc;
	remove_old(folder, &new);
	folder->begun = false;
	return 0;
}

/* --------------------------------------------------------------------------------- abandon -- */

/*
 * A commit may have failed in its very last step: then the manifest is there, and perhaps not for
 * long. Of a step that is new it is taken back. Of one that was replaced nothing can be brought
 * back, so all stays, for whichever of both manifests comes up.
 */
static int take_back(struct pen_checkpoints *folder, int fd)
{
	struct pen_checkpoint *now;
	char name[MANIFEST_STEP_NAME];
	int rc = folder->fresh ? checkpoint_unname(fd) : 0;

	if (rc)
		return rc;
	rc = checkpoint_look(folder, folder->step, &now, NULL);
	if (!folder->fresh && rc)
		return rc == -ENODATA || rc == -EBADMSG ? 0 : rc;
	rc = !folder->fresh && next_turn(now) > folder->turn ? 0 : checkpoint_tidy(fd, now, NULL);
	free(now);
	if (rc || !folder->fresh)
		return rc;
	manifest_step_name(folder->step, name);
	rc = os_rmdir(folder->fd, name);
	/* What others have put there is not ours to remove. */
	return rc == -ENOTEMPTY || rc == -EEXIST ? 0 : rc;
}

static int take_back_own(const struct pen_checkpoints *folder, int fd)
{
	struct pen_checkpoint *now;
	uint32_t turn;
	char name[32];
	int rc = checkpoint_look(folder, folder->step, &now, NULL);

	turn = rc ? 0 : next_turn(now) - 1;
	free(now);
	/* Rank 0 has committed it meanwhile, or has seen to all. */
	if (!rc && turn >= folder->turn)
		return 0;
	manifest_file_name(folder->rank, folder->turn, name);
	rc = os_unlink(fd, name);
	return rc == -ENOENT ? 0 : rc;
}

int pen_checkpoints_abandon(struct pen_checkpoints *folder, struct pen_error *err)
{
	int rc, fd;

	error_clear(err);
	rc = check_begun(folder, "abandon a step in", false, err);
	if (rc)
		return rc;
	folder->begun = false;
	fd = checkpoint_open_step(folder, folder->step);
	if (fd >= 0) {
		rc = folder->rank ? take_back_own(folder, fd) : take_back(folder, fd);
		os_close(fd);
	} else if (fd != -ENOENT) {
		rc = fd;
	}
	return rc ? error_sys(err, rc, "abandon a step in", folder->path, -1) : 0;
}

int pen_checkpoints_leave(struct pen_checkpoints *folder, struct pen_error *err)
{
	int rc;

	error_clear(err);
	rc = check_begun(folder, "leave a step in", false, err);
	if (!rc && !folder->rank)
		return error_set(err, -EINVAL, "leave a step in", folder->path, -1,
				 "rank 0 commits or abandons it");
	if (!rc)
		folder->begun = false;
	return rc;
}
