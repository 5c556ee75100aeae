/* SPDX-License-Identifier: MIT */
/* Coded tensors to host memory; see coded_load.h. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "engine/plan.h"
#include "format/coded.h"
#include "format/coded_load.h"
#include "format/words.h"
#include "sys/os.h"

struct item {
	const struct pen_tensor *tensor;	/* NULL: not coded */
	const struct coded *coded;
	const struct coded_tensor *known;
	const struct coded_chunks *chunks;
	struct pen_extent *box;		/* offsets are those in the tensor's values */
	size_t box_count;
	uint64_t first, end;		/* its chunks, numbered from the tensor's first */
	unsigned char *stored;		/* memory of our own; NULL: at the end of the tensor's */
	uint64_t length;		/* bytes that are read */
	bool relative;			/* the box's memory is in what the job may allocate */
};

struct coded_load {
	struct pen_model *model;
	struct pen_device *device;	/* of the job */
	struct coded_chunks *chunks;	/* of each file of the model */
	struct item *items;		/* of each placement */
	size_t count;
};

int coded_load_new(struct pen_model *model, struct pen_device *device, size_t count,
		   struct coded_load **load, struct pen_error *err)
{
	struct coded_load *new = os_calloc(1, sizeof(*new));

	*load = new;
	if (new) {
		new->model = model;
		new->device = device;
		new->chunks = os_calloc(model->file_count + 1, sizeof(new->chunks[0]));
		new->items = os_calloc(count + 1, sizeof(new->items[0]));
		new->count = count;
	}
	if (new && new->chunks && new->items)
		return 0;
	coded_load_free(new);
	*load = NULL;
	return error_sys(err, -ENOMEM, "load", "the tensors", -1);
}

void coded_load_free(void *load)
{
	struct coded_load *old = load;

	if (!old)
		return;
	for (size_t i = 0; old->items && i < old->count; i++) {
		free(old->items[i].box);
		free(old->items[i].stored);
	}
	for (size_t i = 0; old->chunks && i < old->model->file_count; i++)
		coded_chunks_fini(&old->chunks[i]);
	free(old->items);
	free(old->chunks);
	free(old);
}

/* ---------------------------------------------------------------------------------- planning -- */

/* The tensor's number in its file; the caller may have made the tensor up. */
static int find(const struct coded_load *load, const struct pen_tensor *tensor, size_t *number,
		struct pen_error *err)
{
	const struct coded *coded = load->model->coded[tensor->file];
	char shown[WORDS_NAME];

	for (size_t low = 0, high = coded ? coded->table->count : 0; low < high;) {
		size_t middle = low + (high - low) / 2;
		const struct pen_tensor *there = &coded->table->tensors[middle];

		if (there->offset == tensor->offset && there->coded == tensor->coded &&
		    there->bytes == tensor->bytes && there->dtype == tensor->dtype) {
			*number = middle;
			return 0;
		}
		if (there->offset > tensor->offset)
			high = middle;
		else
			low = middle + 1;
	}
	error_set(err, -EINVAL, "place tensor", words_name(shown, tensor->name), -1,
		  "it is said to be coded, and is not in its file");
	error_hint(err, "Take tensors from this model's pen_model_tensors()");
	return -EINVAL;
}

/* The bytes of the values that a box has, from its first to its last. */
static void span(const struct item *item, uint64_t *from, uint64_t *to)
{
	*from = UINT64_MAX;
	*to = 0;
	for (size_t i = 0; i < item->box_count; i++) {
		const struct pen_extent *part = &item->box[i];
		uint64_t end = part->offset + part->length;

		if (part->rows > 1)
			end += (part->rows - 1) * part->object_pitch;
		*from = part->offset < *from ? part->offset : *from;
		*to = end > *to ? end : *to;
	}
}

/* All of the tensor, as it is? */
static bool is_whole(const struct item *item)
{
	return item->box_count == 1 && item->box[0].length == item->tensor->bytes;
}

static uint64_t offset_of(const struct item *item, uint64_t chunk)
{
	return item->chunks->offsets[item->known->first + chunk];
}

static uint32_t chunk_bytes(const struct item *item)
{
	return PLANES_CHUNK * planes_shapes[item->known->kind].bytes;
}

int coded_load_add(struct coded_load *load, uint64_t group, const struct pen_tensor *tensor,
		   struct pen_extent *box, size_t box_count, struct pen_extent *extent,
		   struct pen_error *err)
{
	const struct pen_model_file *file = &load->model->files[tensor->file];
	struct item *item = &load->items[group];
	uint64_t from, to, last;
	size_t number;
	int rc;

	item->box = box;
	item->box_count = box_count;
	item->relative = !box[0].device || box[0].device == load->device;
	rc = find(load, tensor, &number, err);
	if (rc)
		return rc;
	item->coded = load->model->coded[tensor->file];
	item->tensor = &item->coded->table->tensors[number];
	item->known = &item->coded->tensors[number];
	item->chunks = &load->chunks[tensor->file];
	rc = coded_chunks_read(item->coded, file->object, number, 1,
			       &load->chunks[tensor->file], err);
	if (rc)
		return rc;
	span(item, &from, &to);
	item->first = from / chunk_bytes(item);
	item->end = (to - 1) / chunk_bytes(item) + 1;
	last = item->end - 1;
	item->length = offset_of(item, last) - offset_of(item, item->first) +
		       item->chunks->chunks[item->known->first + last].bytes;
	*extent = (struct pen_extent){
		.object = file->object,
		.offset = offset_of(item, item->first),
		.device = box[0].device,
		.group = group,
	};
	if (is_whole(item)) {
		/* Longer by what fills up the last chunk: then none of them is coded. */
		if (item->length > tensor->bytes)
			item->length = tensor->bytes;
		extent->memory = (void *)((uintptr_t)box[0].memory + tensor->bytes - item->length);
	} else {
		extent->memory = item->stored = os_calloc(1, (size_t)item->length);
		extent->flags = PLAN_ABSOLUTE;
		if (!item->stored)
			return error_sys(err, -ENOMEM, "load", file->path, -1);
	}
	extent->length = item->length;
	return 0;
}

/* ---------------------------------------------------------------------------------- decoding -- */

/* What a chunk, whose values begin at byte `from` of the tensor's, has of one part of a box. */
static void copy_part(const struct pen_extent *part, uintptr_t base, const unsigned char *values,
		      uint64_t from, uint64_t to)
{
	uint64_t rows = part->rows ? part->rows : 1, row = 0;

	if (rows > 1 && from >= part->offset + part->length)
		row = (from - part->offset - part->length) / part->object_pitch + 1;
	for (; row < rows; row++) {
		uint64_t begin = part->offset + row * part->object_pitch;
		uint64_t end = begin + part->length;
		uint64_t low = begin > from ? begin : from, high = end < to ? end : to;

		if (begin >= to)
			break;
		if (low < high)
			memcpy((char *)(base + (uintptr_t)part->memory) + row * part->memory_pitch +
			       (low - begin), values + (low - from), (size_t)(high - low));
	}
}

static int decode_chunk(const struct item *item, uint64_t number, const unsigned char *stored,
			void *values, struct pen_error *err)
{
	const struct planes_chunk *chunk = &item->chunks->chunks[item->known->first + number];

	if (planes_decode(item->known->kind, stored, chunk,
			  coded_chunk_values(item->known, number), values))
		return 0;
	return coded_damaged(item->box[0].object->name, item->tensor, number,
			     offset_of(item, number), err);
}

static int decode_whole(const struct item *item, uintptr_t base, struct pen_error *err)
{
	unsigned char *memory = (unsigned char *)(base + (uintptr_t)item->box[0].memory);
	const unsigned char *coded = memory + item->tensor->bytes - item->length;
	unsigned char stored[PLANES_ROOM];
	int rc = 0;

	for (uint64_t i = 0; i < item->end && !rc; i++) {
		uint64_t at = offset_of(item, i) - offset_of(item, 0);
		uint64_t bytes = item->chunks->chunks[item->known->first + i].bytes;

		if (bytes > item->length - at)
			bytes = item->length - at;
		/* The values may come to lie over it. */
		memcpy(stored, coded + at, (size_t)bytes);
		rc = decode_chunk(item, i, stored, memory + i * chunk_bytes(item), err);
	}
	return rc;
}

static int decode_box(const struct item *item, uintptr_t base, struct pen_error *err)
{
	unsigned char values[PLANES_ROOM];
	int rc = 0;

	for (uint64_t i = item->first; i < item->end && !rc; i++) {
		uint64_t from = i * chunk_bytes(item), to = from + chunk_bytes(item);

		rc = decode_chunk(item, i, item->stored + (offset_of(item, i) -
							   offset_of(item, item->first)),
				  values, err);
		for (size_t part = 0; part < item->box_count && !rc; part++)
			copy_part(&item->box[part], base, values, from, to);
	}
	return rc;
}

int coded_load_finish(void *load, void *allocated, uint64_t group, struct pen_error *err)
{
	struct coded_load *all = load;
	struct item *item = group < all->count ? &all->items[group] : NULL;
	uintptr_t base;
	int rc;

	if (!item || !item->tensor)
		return 0;
	base = item->relative ? (uintptr_t)allocated : 0;
	rc = item->stored ? decode_box(item, base, err) : decode_whole(item, base, err);
	free(item->stored);
	item->stored = NULL;
	return rc;
}
