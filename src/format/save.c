/* SPDX-License-Identifier: MIT */
/*
 * Saving: a layout, a new object for each of its files, one job that writes them all, and the order
 * in which they are committed.
 *
 *   start: layout -> objects, with their space reserved -> extents of header, tensors, index -> job
 *          coded: layout -> objects -> index written -> packer, which reads the tensors' memory
 *   wait:  the end of job or packer -> all objects flushed -> files committed -> index committed;
 *          of a folder in the manner of folder.h
 *
 * Invariants
 *   1. Until every file is durable none has its name: what storage has in store comes while the
 *      folder is still as it was.
 *   2. The index comes after all files that it names, and nothing is removed before it is there.
 *   3. Whatever ends a save releases everything it holds; objects that were not committed leave no
 *      trace.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "engine/job.h"
#include "format/folder.h"
#include "format/layout.h"
#include "format/save_coded.h"
#include "format/shards.h"
#include "io/object.h"
#include "sys/os.h"

struct pen_save {
	struct pen_layout *layout;
	char *path;			/* of the folder; NULL: it is one file */
	struct folder folder;
	struct pen_device *host;
	struct pen_object **objects;	/* of the files, then of the index where it is needed */
	size_t object_count;
	struct pen_job *job;		/* that writes them all, or ... */
	struct save_coded *coded;	/* ... the packer */
	atomic_bool cancelled;
};

static void save_free(struct pen_save *save)
{
	for (size_t i = 0; i < save->object_count; i++)
		pen_object_close(save->objects[i]);
	free(save->objects);
	pen_device_close(save->host);
	folder_fini(&save->folder);
	free(save->path);
	pen_layout_free(save->layout);
	free(save);
}

/* ----------------------------------------------------------------------------------- start -- */

static int open_object(struct pen_save *save, const char *path, const char *name, uint64_t size,
		       struct pen_error *err)
{
	size_t room = strlen(path) + (name ? strlen(name) : 0) + 2;
	char *full = os_calloc(room, 1);
	int rc;

	if (!full)
		return error_sys(err, -ENOMEM, "save", path, -1);
	snprintf(full, room, name ? "%s/%s" : "%s", path, name);
	rc = pen_object_open(full, PEN_WRITE, size, &save->objects[save->object_count], err);
	save->object_count += !rc;
	free(full);
	return rc;
}

/* Where it is now, wherever the process goes until the end. */
static int open_folder(struct pen_save *save, const char *path, struct pen_error *err)
{
	char whole[PATH_MAX];
	int rc;

	save->folder.fd = rc = os_open(AT_FDCWD, path, O_RDONLY | O_DIRECTORY, 0);
	if (rc >= 0)
		rc = os_realpath(path, whole);
	if (rc < 0) {
		error_sys(err, rc, "open the folder", path, -1);
		error_hint(err, rc == -ENOENT ? "Create it first"
			   : rc == -ENOTDIR ? "Name a folder; what is there is a file"
					    : "Check its permissions");
		return rc;
	}
	save->path = os_calloc(1, strlen(whole) + 1);
	if (!save->path)
		return error_sys(err, -ENOMEM, "save", path, -1);
	strcpy(save->path, whole);
	save->folder.path = save->path;
	save->folder.layout = save->layout;
	return 0;
}

static bool has_index(const struct pen_save *save)
{
	return save->layout->file_count > 1;
}

/* How large a coded file gets is known when it is coded. */
static int open_objects(struct pen_save *save, const char *path, bool coded, struct pen_error *err)
{
	const struct pen_layout *layout = save->layout;
	int rc = 0;

	save->objects = os_calloc(layout->file_count + 1, sizeof(save->objects[0]));
	if (!save->objects)
		return error_sys(err, -ENOMEM, "save", path, -1);
	for (size_t i = 0; !rc && i < layout->file_count; i++)
		rc = open_object(save, path, layout->files[i].name,
				 coded ? 0 : layout->files[i].size, err);
	if (!rc && has_index(save))
		rc = open_object(save, path, SHARDS_INDEX, layout->index_size, err);
	return rc;
}

/* Headers, tensors and the index; `count` is set to how many extents they are. */
static struct pen_extent *make_extents(const struct pen_save *save,
				       const struct pen_save_tensor *tensors, size_t tensor_count,
				       size_t *count)
{
	const struct pen_layout *layout = save->layout;
	struct pen_extent *extents, *at;

	at = extents = os_calloc(layout->file_count + tensor_count + 1, sizeof(extents[0]));
	if (!extents)
		return NULL;
	for (size_t i = 0; i < layout->file_count; i++)
		*at++ = (struct pen_extent){
			.object = save->objects[i],
			.memory = (void *)(uintptr_t)layout->files[i].header,
			.length = layout->files[i].header_size,
			.device = save->host,
		};
	for (size_t i = 0; i < tensor_count; i++)
		*at++ = (struct pen_extent){
			.object = save->objects[layout->places[i].file],
			.offset = layout->places[i].offset,
			.memory = tensors[i].memory,
			.length = layout->places[i].bytes,
			.device = tensors[i].device ? tensors[i].device : save->host,
		};
	if (has_index(save))
		*at++ = (struct pen_extent){
			.object = save->objects[layout->file_count],
			.memory = (void *)(uintptr_t)layout->index,
			.length = layout->index_size,
			.device = save->host,
		};
	*count = (size_t)(at - extents);
	return extents;
}

/* The job is said to be of the first GPU that it has; it is of all. */
static struct pen_device *main_device(const struct pen_save *save,
				      const struct pen_save_tensor *tensors, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (tensors[i].device && !tensors[i].device->is_host)
			return tensors[i].device;
	return save->host;
}

static int start_job(struct pen_save *save, const char *path,
		     const struct pen_save_tensor *tensors, size_t count,
		     const struct pen_options *transfer, struct pen_error *err)
{
	size_t extent_count;
	struct pen_extent *extents = make_extents(save, tensors, count, &extent_count);
	int rc;

	if (!extents)
		return error_sys(err, -ENOMEM, "save", path, -1);
	rc = pen_job_start(PEN_WRITE, main_device(save, tensors, count), extents, extent_count,
			   transfer, &save->job, err);
	free(extents);
	return rc;
}

static int start_coded(struct pen_save *save, const struct pen_save_tensor *tensors, size_t count,
		       const struct pen_options *transfer, struct pen_error *err)
{
	const struct pen_layout *layout = save->layout;
	struct pen_extent index = {
		.memory = (void *)(uintptr_t)layout->index,
		.length = layout->index_size,
	};
	int rc = 0;

	if (has_index(save)) {
		index.object = save->objects[layout->file_count];
		rc = pen_transfer(PEN_WRITE, save->host, &index, 1, NULL, NULL, err);
	}
	if (!rc)
		rc = save_coded_start(layout, tensors, count, save->objects, save->host,
				      main_device(save, tensors, count), transfer, &save->coded,
				      err);
	return rc;
}

static int start(struct pen_save *save, const char *path, const struct pen_save_tensor *tensors,
		 size_t count, const struct pen_save_options *options, struct pen_error *err)
{
	int rc = pen_device_open("host", &save->host, err);

	if (!rc && layout_is_folder(options))
		rc = open_folder(save, path, err);
	if (!rc)
		rc = open_objects(save, path, options->coded, err);
	if (rc)
		return rc;
	return options->coded ? start_coded(save, tensors, count, options->transfer, err)
			      : start_job(save, path, tensors, count, options->transfer, err);
}

int pen_save_start(const char *path, const struct pen_save_tensor *tensors, size_t count,
		   const struct pen_save_options *options, struct pen_save **save,
		   struct pen_error *err)
{
	struct pen_save_options full;
	struct pen_save *new;
	int rc;

	error_clear(err);
	*save = NULL;
	rc = layout_options(options, &full, err);
	if (rc)
		return rc;
	new = os_calloc(1, sizeof(*new));
	if (!new)
		return error_sys(err, -ENOMEM, "save", path, -1);
	new->folder.fd = -1;
	rc = pen_layout_make(tensors, count, &full, &new->layout, err);
	if (!rc)
		rc = start(new, path, tensors, count, &full, err);
	if (rc)
		save_free(new);
	else
		*save = new;
	return rc;
}

void pen_save_poll(struct pen_save *save, struct pen_progress *progress)
{
	if (save->coded)
		save_coded_poll(save->coded, progress);
	else
		pen_job_poll(save->job, progress);
}

void pen_save_cancel(struct pen_save *save)
{
	/* The job may have ended already, and what it wrote must not be committed either. */
	atomic_store(&save->cancelled, true);
	if (save->coded)
		save_coded_cancel(save->coded);
	else
		pen_job_cancel(save->job);
}

int pen_save_wait_for(struct pen_save *save, double seconds)
{
	return save->coded ? save_coded_wait_for(save->coded, seconds)
			   : pen_job_wait_for(save->job, seconds);
}

/* ------------------------------------------------------------------------------------ wait -- */

static int commit_objects(struct pen_save *save, struct pen_error *err)
{
	int rc = 0;

	for (size_t i = 0; !rc && i < save->object_count; i++)
		rc = pen_object_commit(save->objects[i], err);
	return rc;
}

/* Of one file an index that is there already must lead to it, until it can go. */
static int commit_folder(struct pen_save *save, struct pen_error *err)
{
	struct folder *folder = &save->folder;
	int rc = folder_prepare(folder, err);

	if (rc)
		return rc;
	rc = commit_objects(save, err);
	if (!rc && !has_index(save) && folder_has_index(folder))
		rc = folder_write(folder, SHARDS_INDEX, save->layout->index,
				  save->layout->index_size, err);
	if (!rc) {
		folder_finish(folder);
		return 0;
	}
	folder_undo(folder);
	/* What the last file was told is not true any more. */
	if (err)
		text_copy(err->hint, sizeof(err->hint), "The folder was left as it was");
	return rc;
}

static int commit(struct pen_save *save, struct pen_error *err)
{
	int rc = 0;

	/* One file is flushed by its commit. */
	for (size_t i = 0; !rc && save->object_count > 1 && i < save->object_count; i++)
		rc = object_flush(save->objects[i], err);
	if (!rc && atomic_load(&save->cancelled))
		rc = error_set(err, -ECANCELED, "finish", "the save", -1, "it was cancelled");
	if (rc)
		return rc;
	return save->path ? commit_folder(save, err) : commit_objects(save, err);
}

int pen_save_wait(struct pen_save *save, struct pen_report *report, struct pen_error *err)
{
	int rc = job_report_check(report, err);

	if (rc)
		return rc;
	rc = save->coded ? save_coded_wait(save->coded, report, err)
			 : pen_job_wait(save->job, report, err);
	/* A forked child has no part in it. */
	if (rc == -ECHILD)
		return rc;
	if (!rc)
		rc = commit(save, err);
	save_free(save);
	return rc;
}
