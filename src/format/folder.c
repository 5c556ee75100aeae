/* SPDX-License-Identifier: MIT */
/* One model after another in a folder; see folder.h. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "format/folder.h"
#include "format/model.h"
#include "format/shards.h"
#include "io/object.h"
#include "io/replace.h"
#include "sys/os.h"

#define SUFFIX ".safetensors"
#define MARK ".penstock-"
#define DIGITS 16

/* ----------------------------------------------------------------------------------- names -- */

/* That of a file has its ending, by which others know what it is; that of an index none, or it
 * would be taken for one. They are not leftovers (leftovers.c), which any writer removes. */
static int second_name(const char *name, char second[NAME_MAX + 1])
{
	const char *ending = text_ends_with(name, SUFFIX) ? SUFFIX : "";
	uint64_t number;
	int rc = os_entropy(&number, sizeof(number));

	snprintf(second, NAME_MAX + 1, "%.*s" MARK "%0*llx%s",
		 (int)(strlen(name) - strlen(ending)), name, DIGITS, (unsigned long long)number,
		 ending);
	return rc;
}

static bool is_second_name(const char *name)
{
	const char *mark = strstr(name, MARK), *ending;
	char first[NAME_MAX + 1];

	if (!mark || strspn(mark + strlen(MARK), "0123456789abcdef") != DIGITS)
		return false;
	ending = mark + strlen(MARK) + DIGITS;
	snprintf(first, sizeof(first), "%.*s%s", (int)(mark - name), name, ending);
	return *ending ? shards_is_name(first) : !strcmp(first, SHARDS_INDEX);
}

static bool is_new(const struct folder *folder, const char *name)
{
	for (size_t i = 0; i < folder->layout->file_count; i++)
		if (!strcmp(name, folder->layout->files[i].name))
			return true;
	return false;
}

static bool is_file(const struct folder *folder, const char *name)
{
	struct stat st;

	return !os_lstat(folder->fd, name, &st) && S_ISREG(st.st_mode);
}

bool folder_has_index(const struct folder *folder)
{
	struct stat st;

	return !os_lstat(folder->fd, SHARDS_INDEX, &st);
}

/* ----------------------------------------------------------------------------------- index -- */

static char *join(const char *path, const char *name)
{
	size_t room = strlen(path) + strlen(name) + 2;
	char *full = os_calloc(room, 1);

	if (full)
		snprintf(full, room, "%s/%s", path, name);
	return full;
}

int folder_write(const struct folder *folder, const char *name, const void *text, size_t size,
		 struct pen_error *err)
{
	struct pen_extent extent = { .memory = (void *)(uintptr_t)text, .length = size };
	char *path = join(folder->path, name);
	struct pen_device *host = NULL;
	int rc = path ? pen_device_open("host", &host, err)
		      : error_sys(err, -ENOMEM, "save", name, -1);

	if (!rc)
		rc = pen_object_open(path, PEN_WRITE, size, &extent.object, err);
	if (!rc)
		rc = pen_transfer(PEN_WRITE, host, &extent, 1, NULL, NULL, err);
	if (!rc)
		rc = pen_object_commit(extent.object, err);
	pen_object_close(extent.object);
	pen_device_close(host);
	free(path);
	return rc;
}

/* What writing an index wants to know of the old model. */
struct listing {
	struct pen_save_tensor *tensors;
	size_t *by_name;
	uint32_t *files;
	const char **names;
	uint64_t total;
};

static void list(const struct folder *folder, struct listing *listing)
{
	const struct pen_model *old = folder->old;

	for (size_t i = 0; i < old->tensor_count; i++) {
		const struct pen_tensor *tensor = &old->tensors[i];

		listing->tensors[i].name = tensor->name;
		listing->tensors[i].name_length = tensor->name_length;
		listing->files[i] = tensor->file;
		listing->by_name[i] = (size_t)(old->by_name[i] - old->tensors);
		listing->total += tensor->bytes;
	}
	for (size_t i = 0; i < old->file_count; i++)
		listing->names[i] = folder->second[i][0] ? folder->second[i] : old->files[i].name;
}

/* An index that leads to the old model, by the second names of its files. */
static int lead_to_old(struct folder *folder, struct pen_error *err)
{
	const struct pen_model *old = folder->old;
	struct listing listing = {
		.tensors = os_calloc(old->tensor_count + 1, sizeof(listing.tensors[0])),
		.by_name = os_calloc(old->tensor_count + 1, sizeof(listing.by_name[0])),
		.files = os_calloc(old->tensor_count + 1, sizeof(listing.files[0])),
		.names = os_calloc(old->file_count + 1, sizeof(listing.names[0])),
	};
	char *text = NULL;
	size_t size = 0;
	int rc;

	if (listing.tensors && listing.by_name && listing.files && listing.names) {
		list(folder, &listing);
		rc = shards_index(listing.tensors, listing.by_name, old->tensor_count,
				  listing.files, listing.names, listing.total, &text, &size, err);
	} else {
		rc = error_sys(err, -ENOMEM, "save", folder->path, -1);
	}
	if (!rc)
		rc = folder_write(folder, SHARDS_INDEX, text, size, err);
	free(text);
	free(listing.tensors);
	free(listing.by_name);
	free(listing.files);
	free(listing.names);
	return rc;
}

/* --------------------------------------------------------------------------------- prepare -- */

/* Would a file of the new model be taken for one of the old? */
static bool must_be_led(const struct folder *folder)
{
	if (!folder_has_index(folder))
		return true;
	for (size_t i = 0; i < folder->old->file_count; i++)
		if (is_new(folder, folder->old->files[i].name))
			return true;
	return false;
}

/* A second name for the index too, to be put back as it was. */
static int keep_index(struct folder *folder)
{
	int fd, rc;

	if (!folder_has_index(folder))
		return 0;
	fd = is_file(folder, SHARDS_INDEX) ? os_open(folder->fd, SHARDS_INDEX, O_RDONLY, 0)
					   : -EINVAL;
	if (fd < 0)
		return fd;
	rc = second_name(SHARDS_INDEX, folder->index);
	if (!rc)
		rc = os_link_fd(fd, folder->fd, folder->index);
	if (rc)
		folder->index[0] = 0;
	os_close(fd);
	return rc;
}

static int keep_files(struct folder *folder)
{
	int rc = 0;

	for (size_t i = 0; !rc && i < folder->old->file_count; i++) {
		const struct pen_model_file *file = &folder->old->files[i];

		if (!is_new(folder, file->name))
			continue;
		/* Behind a link there is another place, where no name is wanted; and names of the
		 * caller's own would not be known again after a kill. */
		rc = is_file(folder, file->name) && shards_is_name(file->name)
			     ? second_name(file->name, folder->second[i]) : -EINVAL;
		if (!rc)
			rc = os_link_fd(file->object->fd, folder->fd, folder->second[i]);
		if (rc)
			folder->second[i][0] = 0;
	}
	return rc;
}

static void forget_old(struct folder *folder)
{
	for (size_t i = 0; folder->second && i < folder->old->file_count; i++)
		if (folder->second[i][0])
			os_unlink(folder->fd, folder->second[i]);
	if (folder->index[0])
		os_unlink(folder->fd, folder->index);
	pen_model_close(folder->old);
	folder->old = NULL;
}

/* As it was before lead_to_old(); where both names are one file still, nothing happens. */
static int put_index_back(struct folder *folder)
{
	return folder->index[0] ? os_rename(folder->fd, folder->index, SHARDS_INDEX)
				: os_unlink(folder->fd, SHARDS_INDEX);
}

/* What was not there is to be gone again if it comes to nothing. */
static void note_names(struct folder *folder)
{
	struct stat st;

	folder->fresh = os_calloc(folder->layout->file_count, sizeof(folder->fresh[0]));
	for (size_t i = 0; folder->fresh && i < folder->layout->file_count; i++)
		folder->fresh[i] = os_lstat(folder->fd, folder->layout->files[i].name, &st) ==
				   -ENOENT;
}

int folder_prepare(struct folder *folder, struct pen_error *err)
{
	int rc = pen_model_open(folder->path, &folder->old, NULL);

	note_names(folder);
	/* What cannot be opened as a model is none that could be lost. */
	if (rc)
		return 0;
	folder->second = os_calloc(folder->old->file_count + 1, sizeof(folder->second[0]));
	/* One file takes the place of one by itself. */
	if (!folder->second || (!folder_has_index(folder) && folder->layout->file_count == 1) ||
	    keep_index(folder) || keep_files(folder)) {
		forget_old(folder);
		return 0;
	}
	rc = must_be_led(folder) ? lead_to_old(folder, err) : 0;
	/* Where not even that can be done, the second names are all that is left of it. */
	if (rc && !put_index_back(folder))
		forget_old(folder);
	return rc;
}

/* ------------------------------------------------------------------------------ after that -- */

/* Put an old file back under its own name too; only a rename puts one over another. */
static int put_back(struct folder *folder, size_t number)
{
	const struct pen_model_file *file = &folder->old->files[number];
	char temporary[NAME_MAX + 1];
	int rc = leftover_name(file->name, temporary);

	if (!rc)
		rc = os_link_fd(file->object->fd, folder->fd, temporary);
	if (rc)
		return rc;
	rc = os_rename(folder->fd, temporary, file->name);
	/* Which does nothing where both are the same file. */
	os_unlink(folder->fd, temporary);
	return rc;
}

void folder_undo(struct folder *folder)
{
	int rc = 0;

	for (size_t i = 0; folder->fresh && i < folder->layout->file_count; i++)
		if (folder->fresh[i])
			os_unlink(folder->fd, folder->layout->files[i].name);
	if (!folder->old)
		return;
	for (size_t i = 0; !rc && i < folder->old->file_count; i++)
		if (folder->second[i][0])
			rc = put_back(folder, i);
	/* While the index leads to the second names the old model is whole all the same. */
	if (!rc && !put_index_back(folder))
		forget_old(folder);
}

static int remove_if_stale(const char *name, void *context)
{
	const struct folder *folder = context;

	if (is_second_name(name) || (shards_is_name(name) && !is_new(folder, name)))
		os_unlink(folder->fd, name);
	return 0;
}

void folder_finish(struct folder *folder)
{
	os_list(folder->fd, ".", remove_if_stale, folder);
	if (folder->layout->file_count > 1 || !folder_has_index(folder))
		return;
	/* Without an index all files count, so the others must be gone for good before it. */
	os_fsync(folder->fd);
	os_unlink(folder->fd, SHARDS_INDEX);
}

void folder_fini(struct folder *folder)
{
	pen_model_close(folder->old);
	free(folder->second);
	free(folder->fresh);
	if (folder->fd >= 0)
		os_close(folder->fd);
}
