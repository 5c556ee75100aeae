/* SPDX-License-Identifier: MIT */
/*
 * What is said of a file of a checkpoint, and whether it is true. The digest of a file is that of
 * its records - where each lies, its size, its CRC32 - and so of every byte that torch reads,
 * without reading them.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "format/checkpoint.h"
#include "format/torch.h"
#include "format/zip.h"
#include "sys/os.h"

#define RECORD_BYTES 24u

static int digest_records(const struct pen_torch *file, uint64_t *digest, struct pen_error *err)
{
	unsigned char *bytes = os_calloc(file->record_count + 1, RECORD_BYTES), *at = bytes;
	int rc;

	if (!bytes)
		return error_sys(err, -ENOMEM, "read", file->path, -1);
	for (size_t i = 0; i < file->record_count; i++) {
		const struct pen_torch_record *record = &file->records[i];

		at = zip_put(at, record->offset, 8);
		at = zip_put(at, record->bytes, 8);
		at = zip_put(at, record->crc32, 8);
	}
	rc = pen_digest_of(PEN_DIGEST_XXH3, bytes, (size_t)(at - bytes), digest, err);
	free(bytes);
	return rc;
}

/* By the pickle; by storages where it is too much for the parser that reads it as data. */
static uint64_t count_tensors(struct pen_torch *file)
{
	const struct pen_torch_tensor *tensors;
	size_t count = 0;

	if (!pen_torch_tensors(file, &tensors, &count, NULL))
		return count;
	count = 0;
	for (size_t i = 0; i < file->record_count; i++)
		count += torch_is_storage(&file->records[i]);
	return count;
}

static int describe(struct pen_torch *torch, struct pen_checkpoint_file *file,
		    struct pen_error *err)
{
	const char *slash = strrchr(torch->path, '/');
	uint64_t digest;
	int rc = digest_records(torch, &digest, err);

	if (rc)
		return rc;
	*file = (struct pen_checkpoint_file){ .bytes = pen_object_size(torch->object) };
	snprintf(file->name, sizeof(file->name), "%s", slash ? slash + 1 : torch->path);
	snprintf(file->digest, sizeof(file->digest), "xxh3:%016" PRIx64, digest);
	return 0;
}

int checkpoint_describe(const char *path, bool counted, struct pen_checkpoint_file *file,
			struct pen_error *err)
{
	struct pen_torch *torch;
	int rc = pen_torch_open(path, &torch, err);

	if (rc)
		return rc;
	rc = describe(torch, file, err);
	if (!rc && counted)
		file->tensors = count_tensors(torch);
	pen_torch_close(torch);
	return rc;
}

static bool is_same(const struct pen_checkpoint_file *one, const struct pen_checkpoint_file *other)
{
	return one->bytes == other->bytes && !strcmp(one->digest, other->digest);
}

static int check_file(const char *path, const struct pen_checkpoint_file *said,
		      struct pen_error *err)
{
	struct pen_checkpoint_file is;
	int rc = checkpoint_describe(path, false, &is, err);

	if (rc || is_same(&is, said))
		return rc;
	error_set(err, -EILSEQ, "use", path, -1, "its records are not those of the file that was "
		  "saved with this step");
	error_hint(err, "Was another file put in its place? Put the right one back, or restore an "
			"earlier step");
	return -EILSEQ;
}

int pen_checkpoints_check(struct pen_checkpoints *folder, uint64_t step, uint32_t rank,
			  struct pen_error *err)
{
	struct pen_checkpoint *checkpoint;
	char *path;
	int rc;

	error_clear(err);
	rc = pen_checkpoints_show(folder, step, &checkpoint, err);
	if (rc)
		return rc;
	if (rank >= checkpoint->file_count) {
		rc = error_set(err, -EINVAL, "use", folder->path, -1, "rank %" PRIu32 " is none of "
			       "%zu", rank, checkpoint->file_count);
	} else {
		path = checkpoint_path(folder, step, checkpoint->files[rank].name);
		rc = path ? check_file(path, &checkpoint->files[rank], err)
			  : error_sys(err, -ENOMEM, "use", folder->path, -1);
		free(path);
	}
	free(checkpoint);
	return rc;
}

/* ----------------------------------------------------------------------------------- verify -- */

/* One that was opened when the manifest was read is what is verified, whatever happens to it. */
static int verify_file(const char *path, const struct pen_checkpoint_file *said,
		       const struct pen_options *options, struct pen_torch_checked *checked,
		       struct pen_error *err)
{
	struct pen_checkpoint_file is;
	struct pen_torch *torch;
	int rc = pen_torch_open(path, &torch, err);

	if (rc)
		return rc;
	rc = describe(torch, &is, err);
	if (!rc && is.bytes == said->bytes)
		rc = pen_torch_verify(torch, options, checked, err);
	/* After its bytes, whose words are better: what they do not explain is another file. */
	if (!rc && !is_same(&is, said))
		rc = error_set(err, -EILSEQ, "verify", path, -1, "it is whole, but not the file "
			       "that was saved with this step");
	pen_torch_close(torch);
	return rc;
}

static int verify_files(struct pen_checkpoints *folder, const struct pen_checkpoint *step,
			const struct pen_options *options, struct pen_checkpoint_checked *sum,
			struct pen_error *err)
{
	int rc = 0;

	for (size_t i = 0; !rc && i < step->file_count; i++) {
		struct pen_torch_checked checked = PEN_TORCH_CHECKED_INIT;
		char *path = checkpoint_path(folder, step->step, step->files[i].name);

		rc = path ? verify_file(path, &step->files[i], options, &checked, err)
			  : error_sys(err, -ENOMEM, "verify", folder->path, -1);
		free(path);
		if (rc)
			break;
		sum->files++;
		sum->bytes += step->files[i].bytes;
		sum->verified += checked.verified;
		sum->unverified += checked.unverified;
	}
	return rc;
}

int pen_checkpoints_verify(struct pen_checkpoints *folder, uint64_t step,
			   const struct pen_options *options,
			   struct pen_checkpoint_checked *checked, struct pen_error *err)
{
	struct pen_checkpoint_checked sum = PEN_CHECKPOINT_CHECKED_INIT;
	struct pen_checkpoint *checkpoint, *now;
	int rc;

	error_clear(err);
	if (checked && checked->size < sizeof(*checked))
		return error_set(err, -EINVAL, "verify", folder->path, -1,
				 "the size of what is found is not set");
	rc = pen_checkpoints_show(folder, step, &checkpoint, err);
	if (rc)
		return rc;
	rc = verify_files(folder, checkpoint, options, &sum, err);
	free(checkpoint);
	if (checked)
		*checked = sum;
	/* Removed meanwhile: then it is not there, and not damaged. */
	if (rc == -ENOENT && !pen_checkpoints_show(folder, step, &now, err))
		free(now);
	return rc;
}
