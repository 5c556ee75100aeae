/* SPDX-License-Identifier: MIT */
/* Files that are only in memory yet, for the packer; see save_coded.h. */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "engine/job.h"
#include "engine/schedule.h"
#include "format/coded.h"
#include "format/pack.h"
#include "format/save_coded.h"
#include "mem/device.h"
#include "sys/os.h"

#define LOOK_NS 20000u	/* between two looks at a stream */

/* One file of the layout. */
struct source {
	struct save_coded *all;
	const struct pen_layout_file *file;
	struct safetensors *table;	/* in `coded`, if that is not NULL */
	struct coded *coded;		/* what its metadata claim */
};

struct save_coded {
	const struct pen_layout *layout;
	struct pen_save_tensor *tensors;	/* our copy; names and shapes are not looked at */
	struct pen_device *host;
	struct source *sources;		/* one for each file */
	struct job_after *after;	/* all of it comes first */
	size_t after_count;
	atomic_bool followed;		/* and has come */
	atomic_bool cancelled;		/* nobody waits for it any more */
	struct pen_pack *pack;
	struct pen_device *device;	/* that the save is said to be of */
};

static void save_coded_free(struct save_coded *coded)
{
	for (size_t i = 0; coded->sources && i < coded->layout->file_count; i++) {
		if (coded->sources[i].coded)
			coded_free(coded->sources[i].coded);
		else
			free(coded->sources[i].table);
	}
	for (size_t i = 0; i < coded->after_count; i++)
		device_fence_close(coded->after[i].device, &coded->after[i].fence);
	free(coded->after);
	free(coded->sources);
	free(coded->tensors);
	free(coded);
}

/* ---------------------------------------------------------------------------------- reading -- */

/* Wait for what the callers' streams held at the start. On threads of the packer's. */
static int follow(struct save_coded *coded, struct pen_error *err)
{
	int rc = 0;

	for (size_t i = 0; !rc && !coded->followed && i < coded->after_count; i++) {
		struct job_after *after = &coded->after[i];

		rc = device_enter(after->device, err);
		while (!rc && (rc = device_poll(after->device, &after->fence, err)) == -EAGAIN) {
			os_sleep(LOOK_NS);
			rc = !coded->cancelled ? 0
				: error_set(err, -ECANCELED, "save", "what a stream holds", -1,
					    "it was cancelled");
		}
	}
	if (!rc)
		coded->followed = true;
	return rc;
}

/* The tensor that lies at or before an offset behind the header; a later one if some are empty. */
static size_t tensor_at(const struct source *source, uint64_t offset)
{
	size_t low = 0, high = source->file->tensor_count;

	while (high - low > 1) {
		size_t middle = low + (high - low) / 2;

		if (source->all->layout->places[source->file->tensors[middle]].offset <= offset)
			low = middle;
		else
			high = middle;
	}
	return low;
}

/* Bytes of a file that nobody has written: the header's, then those of tensor after tensor. */
static int read_memory(void *context, void *buffer, uint64_t length, uint64_t offset,
		       struct pen_error *err)
{
	const struct source *source = context;
	struct save_coded *all = source->all;
	unsigned char *to = buffer;
	size_t next = tensor_at(source, offset);
	int rc = follow(all, err);

	if (offset < source->file->header_size) {
		memcpy(to, (const char *)source->file->header + offset, (size_t)length);
		return rc;
	}
	for (; length && !rc; next++) {
		const struct pen_save_tensor *tensor = &all->tensors[source->file->tensors[next]];
		const struct pen_layout_place *place =
			&all->layout->places[source->file->tensors[next]];
		uint64_t from = offset - place->offset, part = place->bytes - from;

		part = part < length ? part : length;
		rc = pen_device_get(tensor->device ? tensor->device : all->host, to,
				    (const char *)tensor->memory + from, part, err);
		to += part;
		offset += part;
		length -= part;
	}
	return rc;
}

/* --------------------------------------------------------------------------------- starting -- */

/* The order behind a stream is taken now, and on this thread, as jobs do it. */
static int go_behind(struct save_coded *coded, struct pen_device *device, void *stream,
		     struct pen_error *err)
{
	struct job_after *after = &coded->after[coded->after_count];
	int rc;

	if (!stream)
		return 0;
	after->device = device;
	rc = device_fence_behind(device, stream, &after->fence, err);
	coded->after_count += !rc;
	return rc;
}

static int go_behind_all(struct save_coded *coded, const struct pen_options *options,
			 struct pen_error *err)
{
	int rc = go_behind(coded, coded->device, options->stream, err);

	for (size_t i = 0; !rc && i < options->stream_count; i++)
		rc = go_behind(coded, options->streams[i].device, options->streams[i].stream,
			       err);
	return rc;
}

/* How the bytes travel is settled: coded on cores, written through the page cache. */
static int check_options(struct pen_device *device, const struct pen_options *options,
			 struct pen_error *err)
{
	if (options->transfer != PEN_AUTO) {
		error_set(err, -EINVAL, "use", "the options", -1,
			  "a coded model is written by the cores that code it, whatever the "
			  "transfer");
		error_hint(err, "Leave the transfer to the library (auto)");
		return -EINVAL;
	}
	return job_streams_check(device, options, err);
}

/* What the packer needs to know of a file, from its header. */
static int describe(struct save_coded *coded, size_t number, struct pen_object *object,
		    struct pack_file *file, struct pen_error *err)
{
	const struct pen_layout_file *laid_out = &coded->layout->files[number];
	struct source *source = &coded->sources[number];
	int rc;

	*source = (struct source){ .all = coded, .file = laid_out };
	rc = safetensors_parse(object->name, (const char *)laid_out->header + sizeof(uint64_t),
			       laid_out->header_size - sizeof(uint64_t), laid_out->size,
			       &source->table, err);
	/* Tensors of a coded file, taken for numbers and saved again, would be coded twice. */
	if (!rc)
		rc = coded_read(object->name, source->table, &source->coded, err);
	*file = (struct pack_file){
		.doing = "save",
		.name = object->name,
		.size = laid_out->size,
		.table = source->table,
		.coded = source->coded,
		.to = object,
		.read = read_memory,
		.source = source,
	};
	return rc;
}

static int start(struct save_coded *coded, struct pen_object *const *objects,
		 const struct pen_options *transfer, struct pen_error *err)
{
	struct pen_pack_options options = PEN_PACK_OPTIONS_INIT;
	size_t count = coded->layout->file_count;
	struct pack_file *files = os_calloc(count + 1, sizeof(files[0]));
	int rc = files ? 0 : error_sys(err, -ENOMEM, "save", objects[0]->name, -1);

	if (!rc)
		rc = go_behind_all(coded, transfer, err);
	for (size_t i = 0; !rc && i < count; i++)
		rc = describe(coded, i, objects[i], &files[i], err);
	if (transfer->memory_limit != PEN_MEMORY_AUTO)
		options.memory_limit = transfer->memory_limit;
	if (!rc)
		rc = pack_start(PACK, files, count, &options, &coded->pack, err);
	free(files);
	return rc;
}

int save_coded_start(const struct pen_layout *layout, const struct pen_save_tensor *tensors,
		     size_t count, struct pen_object *const *objects, struct pen_device *host,
		     struct pen_device *device, const struct pen_options *transfer,
		     struct save_coded **coded, struct pen_error *err)
{
	struct save_coded *new;
	struct pen_options full;
	int rc = schedule_options(transfer, &full, err);

	*coded = NULL;
	if (!rc)
		rc = check_options(device, &full, err);
	if (rc)
		return rc;
	new = os_calloc(1, sizeof(*new));
	if (!new)
		return error_sys(err, -ENOMEM, "save", objects[0]->name, -1);
	new->layout = layout;
	new->host = host;
	new->device = device;
	new->tensors = os_calloc(count + 1, sizeof(tensors[0]));
	new->sources = os_calloc(layout->file_count + 1, sizeof(new->sources[0]));
	new->after = os_calloc(full.stream_count + 1, sizeof(new->after[0]));
	if (new->tensors && new->sources && new->after) {
		memcpy(new->tensors, tensors, count * sizeof(tensors[0]));
		rc = start(new, objects, &full, err);
	} else {
		rc = error_sys(err, -ENOMEM, "save", objects[0]->name, -1);
	}
	if (rc)
		save_coded_free(new);
	else
		*coded = new;
	return rc;
}

void save_coded_poll(struct save_coded *coded, struct pen_progress *progress)
{
	pen_pack_poll(coded->pack, progress);
}

void save_coded_cancel(struct save_coded *coded)
{
	/* The packer first: it is to know why a file cannot be read. */
	pen_pack_cancel(coded->pack);
	coded->cancelled = true;
}

int save_coded_wait_for(struct save_coded *coded, double seconds)
{
	return pen_pack_wait_for(coded->pack, seconds);
}

static void report_packed(const struct save_coded *coded, const struct pen_packed *packed,
			  struct pen_report *report)
{
	struct pen_report full = { .size = sizeof(full) };
	size_t size = report->size < sizeof(full) ? report->size : sizeof(full);

	full.bytes = full.storage_bytes = packed->stored;
	full.delivered_bytes = packed->bytes;
	full.seconds = full.stored_seconds = packed->seconds;
	full.gb_per_s = packed->seconds > 0 ? (double)full.bytes / packed->seconds / 1e9 : 0;
	text_copy(full.device, sizeof(full.device), coded->device->name);
	full.path_count = 1;
	full.paths[0].bytes = packed->stored;
	text_copy(full.paths[0].path, sizeof(full.paths[0].path), "cached");
	text_copy(full.paths[0].reason, sizeof(full.paths[0].reason),
		  "coded on the cores, and written by them through the page cache");
	memcpy(report, &full, size);
	report->size = size;
}

int save_coded_wait(struct save_coded *coded, struct pen_report *report, struct pen_error *err)
{
	struct pen_packed packed = PEN_PACKED_INIT;
	int rc = pen_pack_wait(coded->pack, &packed, err);

	if (rc == -ECHILD)
		return rc;
	if (report)
		report_packed(coded, &packed, report);
	save_coded_free(coded);
	return rc;
}
