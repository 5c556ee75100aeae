/* SPDX-License-Identifier: MIT */
/* Coded tensors to host memory; see coded_load.h. */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/form.h"
#include "engine/plan.h"
#include "format/coded.h"
#include "format/coded_load.h"
#include "format/words.h"
#include "sys/os.h"

#define PART 32u	/* chunks of a part: a MiB of BF16 */

/* A placement of a coded tensor. */
struct item {
	const struct pen_tensor *tensor;	/* NULL: not coded */
	const struct coded *coded;
	const struct coded_tensor *known;
	const struct coded_chunks *chunks;
	struct pen_extent *box;		/* offsets are those in the tensor's values */
	size_t box_count;
	bool relative;			/* the box's memory is in what the job may allocate */
	_Atomic uint64_t left;		/* parts that are not decoded */
};

/* Some chunks of it. A placement's first part has its number, the others follow those of all. */
struct part {
	uint64_t item;
	uint64_t first, end;		/* chunks, numbered from the tensor's first */
	uint64_t length;		/* bytes that are read */
	unsigned char *stored;		/* memory of our own; NULL: at the end of the values' */
};

struct coded_load {
	struct pen_model *model;
	struct pen_device *device;	/* of the job */
	struct coded_chunks *chunks;	/* of each file of the model */
	struct item *items;		/* of each placement */
	size_t count;
	struct part *parts;		/* by group */
	uint64_t part_count, part_room;
	struct pen_extent *extents;
	uint64_t extent_count, extent_room;
};

static int no_memory(struct pen_error *err)
{
	return error_sys(err, -ENOMEM, "load", "the tensors", -1);
}

int coded_load_new(struct pen_model *model, struct pen_device *device, size_t count,
		   uint64_t groups, struct coded_load **load, struct pen_error *err)
{
	struct coded_load *new = os_calloc(1, sizeof(*new));

	*load = new;
	if (!new)
		return no_memory(err);
	new->model = model;
	new->device = device;
	new->chunks = os_calloc(model->file_count + 1, sizeof(new->chunks[0]));
	new->items = os_calloc(count + 1, sizeof(new->items[0]));
	new->parts = os_calloc(groups + 1, sizeof(new->parts[0]));
	if (new->chunks && new->items && new->parts) {
		new->count = count;
		new->part_count = groups;
		new->part_room = groups + 1;
		for (size_t i = 0; i < count; i++)
			new->parts[i].item = i;
		return 0;
	}
	coded_load_free(new);
	*load = NULL;
	return no_memory(err);
}

void coded_load_free(void *load)
{
	struct coded_load *old = load;

	if (!old)
		return;
	for (size_t i = 0; i < old->count; i++)
		free(old->items[i].box);
	for (uint64_t i = 0; i < old->part_count; i++)
		free(old->parts[i].stored);
	for (size_t i = 0; old->chunks && i < old->model->file_count; i++)
		coded_chunks_fini(&old->chunks[i]);
	free(old->items);
	free(old->parts);
	free(old->chunks);
	free(old->extents);
	free(old);
}

/* A list of `room` entries, with room for as many as are wanted; NULL: no memory, and it stays. */
static void *grown(void *list, size_t size, uint64_t wanted, uint64_t *room)
{
	uint64_t larger = wanted + wanted / 2 + 16;

	if (wanted > *room) {
		list = os_realloc(list, (size_t)larger, size);
		if (list)
			*room = larger;
	}
	return list;
}

static int add_extents(struct coded_load *load, const struct pen_extent *extents, size_t count,
		       struct pen_error *err)
{
	struct pen_extent *more = grown(load->extents, sizeof(extents[0]),
					load->extent_count + count + 1, &load->extent_room);

	if (!more)
		return no_memory(err);
	load->extents = more;
	if (count)
		memcpy(load->extents + load->extent_count, extents, count * sizeof(extents[0]));
	load->extent_count += count;
	return 0;
}

int coded_load_plain(struct coded_load *load, uint64_t group, const struct pen_extent *extents,
		     size_t count, struct pen_error *err)
{
	int rc = add_extents(load, extents, count, err);

	for (size_t i = 0; !rc && i < count; i++)
		load->extents[load->extent_count - count + i].group = group;
	return rc;
}

const struct pen_extent *coded_load_extents(const struct coded_load *load, size_t *count,
					    uint64_t *groups)
{
	*count = load->extent_count;
	*groups = load->part_count;
	return load->extents;
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
	return item->box_count == 1 && item->box[0].length == item->tensor->bytes &&
	       !item->box[0].form;
}

static uint64_t offset_of(const struct item *item, uint64_t chunk)
{
	return item->chunks->offsets[item->known->first + chunk];
}

static uint32_t chunk_bytes(const struct item *item)
{
	return PLANES_CHUNK * planes_shapes[item->known->kind].bytes;
}

/* What is read of a chunk: not the bytes that fill up one that is kept plain, since no chunk must
 * be longer than its values. */
static uint64_t stored_bytes(const struct item *item, uint64_t chunk)
{
	uint64_t stored = item->chunks->chunks[item->known->first + chunk].bytes;
	uint64_t bytes = (uint64_t)coded_chunk_values(item->known, chunk) *
			 planes_shapes[item->known->kind].bytes;

	return stored < bytes ? stored : bytes;
}

/* Memory that the values of a chunk begin at, or would end at. */
static uintptr_t place_of(const struct item *item, uint64_t chunk)
{
	uint64_t at = chunk * chunk_bytes(item);

	return (uintptr_t)item->box[0].memory + (at < item->tensor->bytes ? at
									   : item->tensor->bytes);
}

/* Where a part's coded bytes are read to. */
static int choose_memory(const struct item *item, struct part *part, struct pen_extent *extent,
			 struct pen_error *err)
{
	if (!is_whole(item)) {
		extent->memory = part->stored = os_calloc(1, (size_t)part->length);
		extent->flags = PLAN_ABSOLUTE;
		return part->stored ? 0 : no_memory(err);
	}
	extent->memory = (void *)(place_of(item, part->end) - part->length);
	return 0;
}

static int add_part(struct coded_load *load, uint64_t group, uint64_t number, uint64_t first,
		    uint64_t end, struct pen_error *err)
{
	const struct item *item = &load->items[number];
	struct part *part = &load->parts[group];
	struct pen_extent extent = {
		.object = item->box[0].object,
		.offset = offset_of(item, first),
		.device = item->box[0].device,
		.group = group,
	};
	int rc;

	*part = (struct part){ .item = number, .first = first, .end = end };
	part->length = offset_of(item, end - 1) - offset_of(item, first) +
		       stored_bytes(item, end - 1);
	rc = choose_memory(item, part, &extent, err);
	extent.length = part->length;
	return rc ? rc : add_extents(load, &extent, 1, err);
}

/* The chunks of a placement, from `first` on, as parts. */
static int cut(struct coded_load *load, uint64_t number, uint64_t first, uint64_t end,
	       struct pen_error *err)
{
	struct item *item = &load->items[number];
	struct part *more;
	int rc = 0;

	item->left = (end - first + PART - 1) / PART;
	more = grown(load->parts, sizeof(more[0]), load->part_count + item->left,
		     &load->part_room);
	if (!more)
		return no_memory(err);
	load->parts = more;
	for (uint64_t at = first; !rc && at < end; at += PART)
		rc = add_part(load, at == first ? number : load->part_count++, number, at,
			      end - at < PART ? end : at + PART, err);
	return rc;
}

int coded_load_add(struct coded_load *load, uint64_t group, const struct pen_tensor *tensor,
		   struct pen_extent *box, size_t box_count, struct pen_error *err)
{
	struct item *item = &load->items[group];
	uint64_t from, to;
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
	rc = coded_chunks_read(item->coded, box[0].object, number, 1, &load->chunks[tensor->file],
			       err);
	if (rc)
		return rc;
	span(item, &from, &to);
	return cut(load, group, from / chunk_bytes(item), (to - 1) / chunk_bytes(item) + 1, err);
}

/* ---------------------------------------------------------------------------------- decoding -- */

/* What a chunk, whose values begin at byte `from` of the tensor's, has of one extent of a box. */
static void copy_extent(const struct pen_extent *part, uintptr_t base, const unsigned char *values,
			uint64_t from, uint64_t to)
{
	const struct form *form = form_of(part->form);
	uint64_t rows = part->rows ? part->rows : 1, row = 0;

	if (rows > 1 && from >= part->offset + part->length)
		row = (from - part->offset - part->length) / part->object_pitch + 1;
	for (; row < rows; row++) {
		uint64_t begin = part->offset + row * part->object_pitch;
		uint64_t end = begin + part->length;
		uint64_t low = begin > from ? begin : from, high = end < to ? end : to;

		char *memory = (char *)(base + (uintptr_t)part->memory) +
			       row * part->memory_pitch;

		if (begin >= to)
			break;
		if (low >= high)
			continue;
		if (form)
			form->apply(memory + form_bytes(form, low - begin), values + (low - from),
				    (size_t)(high - low) / form->from_size);
		else
			memcpy(memory + (low - begin), values + (low - from),
			       (size_t)(high - low));
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

static int decode_whole(const struct item *item, const struct part *part, uintptr_t base,
			struct pen_error *err)
{
	unsigned char *values = (unsigned char *)(base + place_of(item, part->first));
	const unsigned char *coded = (unsigned char *)(base + place_of(item, part->end)) -
				     part->length;
	unsigned char aside[PLANES_ROOM];
	int rc = 0;

	for (uint64_t i = part->first; i < part->end && !rc; i++) {
		uint64_t at = offset_of(item, i) - offset_of(item, part->first);
		const unsigned char *stored = coded + at;

		/* Towards the end of the part the values come to lie over it. */
		if (stored < values + chunk_bytes(item))
			stored = memcpy(aside, stored, (size_t)stored_bytes(item, i));
		rc = decode_chunk(item, i, stored, values, err);
		values += chunk_bytes(item);
	}
	return rc;
}

static int decode_box(const struct item *item, const struct part *part, uintptr_t base,
		      struct pen_error *err)
{
	_Alignas(uint32_t) unsigned char values[PLANES_ROOM];
	int rc = 0;

	for (uint64_t i = part->first; i < part->end && !rc; i++) {
		uint64_t from = i * chunk_bytes(item), to = from + chunk_bytes(item);

		rc = decode_chunk(item, i, part->stored + (offset_of(item, i) -
							   offset_of(item, part->first)),
				  values, err);
		for (size_t k = 0; k < item->box_count && !rc; k++)
			copy_extent(&item->box[k], base, values, from, to);
	}
	return rc;
}

int coded_load_finish(void *load, void *allocated, uint64_t *group, struct pen_error *err)
{
	struct coded_load *all = load;
	struct part *part = &all->parts[*group];
	struct item *item = &all->items[part->item];
	uintptr_t base;
	int rc;

	if (!item->tensor)
		return 0;
	base = item->relative ? (uintptr_t)allocated : 0;
	rc = part->stored ? decode_box(item, part, base, err)
			  : decode_whole(item, part, base, err);
	free(part->stored);
	part->stored = NULL;
	*group = part->item;
	return rc ? rc : atomic_fetch_sub(&item->left, 1) == 1 ? 0 : -EAGAIN;
}
