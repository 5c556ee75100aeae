/* SPDX-License-Identifier: MIT */
/*
 * From placements to extents. A box in a tensor is a set of loops, each with a count and a stride
 * in the file. Loops of one step fall away, and two that together step evenly become one; what is
 * left is a contiguous run, the rows of a strided extent and, seldom, loops around it, which make
 * one extent for each step. The rows are the loop that makes fewest extents. Of a coded tensor an
 * extent has all chunks from its first value to its last; there they are the loop that costs least,
 * or none.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/form.h"
#include "engine/job.h"
#include "format/coded_load.h"
#include "format/dtype.h"
#include "format/load.h"
#include "format/model.h"
#include "format/words.h"
#include "sys/os.h"

#define ALIGNMENT 256u	/* of what pen_placement_layout() places */
/* A loop has two steps at least, and all together fewer than 2^64; one more for the run, and one
 * for rows that are none. */
#define LOOPS_MAX 66
/* A further extent of a coded tensor is a launch of its own: about what so many chunks take that
 * are decoded beside others. */
#define EXTENT_CHUNKS 8u

struct loop {
	uint64_t count;
	uint64_t file, memory;	/* from one step to the next; elements first, then bytes */
};

struct box {
	uint64_t bytes;		/* of memory; 0: nothing to load, and the rest means nothing */
	uint64_t start;		/* from the tensor's first byte */
	uint64_t extents;	/* how many it becomes */
	struct loop loops[LOOPS_MAX];	/* the run, the rows, then innermost to outermost */
	unsigned int loop_count;
};

static int refuse(struct pen_error *err, const struct pen_tensor *tensor, const char *hint,
		  const char *format, ...) PRINTF_LIKE(4, 5);

static int refuse(struct pen_error *err, const struct pen_tensor *tensor, const char *hint,
		  const char *format, ...)
{
	char shown[WORDS_NAME], message[200];
	va_list args;

	va_start(args, format);
	vsnprintf(message, sizeof(message), format, args);
	va_end(args);
	error_set(err, -EINVAL, "place tensor", words_name(shown, tensor->name), -1, "%s", message);
	error_hint(err, "%s", hint);
	return -EINVAL;
}

/* Sets `empty` where a dimension has no step: then there is nothing to load. */
static int check_bounds(const struct pen_placement *placement, bool *empty, struct pen_error *err)
{
	const struct pen_tensor *tensor = placement->tensor;
	const uint64_t *start = placement->start, *stop = placement->stop;

	*empty = false;
	if (!start != !stop && tensor->rank)
		return refuse(err, tensor, "Set both to NULL for the whole tensor",
			      "the box has a start or a stop, but not both");
	for (uint32_t i = 0; i < tensor->rank; i++) {
		uint64_t from = start ? start[i] : 0, to = stop ? stop[i] : tensor->shape[i];

		if (from > to || to > tensor->shape[i])
			return refuse(err, tensor, "Keep start <= stop <= size in every dimension",
				      "the box goes from %llu to %llu in dimension %u of size %llu",
				      (unsigned long long)from, (unsigned long long)to, i,
				      (unsigned long long)tensor->shape[i]);
		*empty |= from == to;
	}
	return 0;
}

/* A further loop around those that are there; merged where the last one leads up to it. */
static void add_loop(struct box *box, uint64_t count, uint64_t stride)
{
	struct loop *last = &box->loops[box->loop_count - 1];

	if (count == 1)
		return;
	if (last->count * last->file == stride)
		last->count *= count;
	else
		box->loops[box->loop_count++] = (struct loop){ .count = count, .file = stride };
}

/* The loops of a box that is not empty, innermost first, strides in elements. */
static int make_loops(struct box *box, const struct pen_placement *placement,
		      struct pen_error *err)
{
	const struct pen_tensor *tensor = placement->tensor;
	uint64_t stride = 1;

	box->start = 0;
	box->loops[0] = (struct loop){ .count = 1, .file = 1 };
	box->loop_count = 1;
	for (uint32_t i = tensor->rank; i-- > 0;) {
		uint64_t from = placement->start ? placement->start[i] : 0;
		uint64_t to = placement->stop ? placement->stop[i] : tensor->shape[i];

		/* No count is above the shape, so that no product is above this one. */
		if (__builtin_mul_overflow(stride, tensor->shape[i], &(uint64_t){ 0 }))
			return refuse(err, tensor, "Take the shape from pen_model_tensors()",
				      "its shape is larger than 64 bits can count");
		add_loop(box, to - from, stride);
		box->start += from * stride;
		stride *= tensor->shape[i];
	}
	return 0;
}

/* Strides and lengths from elements to bytes; in memory they may have another form. */
static bool to_bytes(struct box *box, int dtype, const struct form *form)
{
	uint64_t bytes;

	if (!dtype_bytes(dtype, box->start, &box->start) ||
	    !dtype_bytes(dtype, box->loops[0].count, &bytes))
		return false;
	box->loops[0].count = bytes;
	/* A shape of twice these bytes may be larger than any memory. */
	if (form && bytes > UINT64_MAX / form->to_size)
		return false;
	bytes = form_bytes(form, bytes);
	for (unsigned int i = 1; i < box->loop_count; i++) {
		struct loop *loop = &box->loops[i];

		if (!dtype_bytes(dtype, loop->file, &loop->file))
			return false;
		loop->memory = bytes;
		if (__builtin_mul_overflow(bytes, loop->count, &bytes))
			return false;
	}
	box->bytes = bytes;
	return true;
}

/* What it costs to have this loop as rows, and so `extents` extents: as many, or, of a tensor with
 * chunks of so many bytes, by what is decoded. */
static uint64_t cost_of(const struct box *box, const struct loop *rows, uint64_t extents,
			uint64_t chunk)
{
	uint64_t span = (rows->count - 1) * rows->file + box->loops[0].count;

	return chunk ? extents * (EXTENT_CHUNKS + 1 + span / chunk) : extents;
}

/* Which loop becomes the rows; one of a single step where it is best that none does. */
static void choose_rows(struct box *box, uint64_t chunk)
{
	struct loop rows = { .count = 1 };
	uint64_t steps = 1, least;
	unsigned int best;

	box->extents = 1;
	if (box->loop_count < 2)
		return;
	for (unsigned int i = 1; i < box->loop_count; i++)
		steps *= box->loops[i].count;
	best = box->loop_count;
	least = cost_of(box, &rows, steps, chunk);
	for (unsigned int i = 1; i < box->loop_count; i++) {
		const struct loop *loop = &box->loops[i];
		uint64_t cost = cost_of(box, loop, steps / loop->count, chunk);

		if (cost >= least)
			continue;
		least = cost;
		best = i;
	}
	if (best < box->loop_count)
		rows = box->loops[best];
	else
		box->loop_count++;
	for (unsigned int i = best; i > 1; i--)
		box->loops[i] = box->loops[i - 1];
	box->loops[1] = rows;
	box->extents = steps / rows.count;
}

static int make_box(struct box *box, const struct pen_placement *placement, struct pen_error *err)
{
	const struct pen_tensor *tensor = placement->tensor;
	const struct form *form = form_of(placement->form);
	bool empty;
	int rc;

	box->bytes = box->extents = box->start = 0;
	if (!tensor)
		return error_set(err, -EINVAL, "place tensor", "", -1,
				 "a placement has no tensor");
	if (!pen_dtype_name(tensor->dtype))
		return refuse(err, tensor, "Take tensors from pen_model_tensors()",
			      "%d is no dtype", tensor->dtype);
	if (placement->form && (!form || form->from != tensor->dtype))
		return refuse(err, tensor, "Ask pen_form_find() for a form from its dtype",
			      "form %llu is none of %s", (unsigned long long)placement->form,
			      pen_dtype_name(tensor->dtype));
	rc = check_bounds(placement, &empty, err);
	if (rc || empty)
		return rc;
	rc = make_loops(box, placement, err);
	if (rc)
		return rc;
	if (!to_bytes(box, tensor->dtype, form))
		return refuse(err, tensor, "Choose a box whose rows begin and end on whole bytes",
			      "the box cuts a byte in two: %s has %u bits an element",
			      pen_dtype_name(tensor->dtype), pen_dtype_bits(tensor->dtype));
	choose_rows(box, tensor->coded ? PLANES_CHUNK * pen_dtype_bits(tensor->dtype) / 8 : 0);
	return 0;
}

int pen_placement_bytes(const struct pen_placement *placement, uint64_t *bytes,
			struct pen_error *err)
{
	struct box box;
	int rc;

	error_clear(err);
	rc = make_box(&box, placement, err);
	*bytes = rc ? 0 : box.bytes;
	return rc;
}

int pen_placement_layout(struct pen_placement *placements, size_t count, uint64_t *total,
			 struct pen_error *err)
{
	uint64_t at = 0;

	*total = 0;
	error_clear(err);
	for (size_t i = 0; i < count; i++) {
		uint64_t bytes;
		int rc = pen_placement_bytes(&placements[i], &bytes, err);

		if (rc)
			return rc;
		at = (at + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
		placements[i].memory = (void *)(uintptr_t)at;
		if (__builtin_add_overflow(at, bytes, &at) || at > UINT64_MAX - ALIGNMENT)
			return refuse(err, placements[i].tensor, "Load fewer tensors at once",
				      "with it, the tensors are larger than any memory");
	}
	*total = at;
	return 0;
}

/* One extent for each step of the outer loops; returns the place after the last. */
static struct pen_extent *put_extents(const struct box *box, struct pen_extent extent,
				      struct pen_extent *to)
{
	/* The memory may be an offset, from which no pointer is made before the job has it. */
	uintptr_t memory = (uintptr_t)extent.memory;
	uint64_t step[LOOPS_MAX] = { 0 };

	extent.length = box->loops[0].count;
	if (box->loop_count > 1) {
		extent.rows = box->loops[1].count;
		extent.object_pitch = box->loops[1].file;
		extent.memory_pitch = box->loops[1].memory;
	}
	for (uint64_t n = 0; n < box->extents; n++) {
		extent.memory = (void *)memory;
		*to++ = extent;
		/* Count up like a clock: a wheel that is through goes back and moves the next. */
		for (unsigned int i = 2; i < box->loop_count; i++) {
			const struct loop *loop = &box->loops[i];

			extent.offset += loop->file;
			memory += loop->memory;
			if (++step[i] < loop->count)
				break;
			extent.offset -= loop->file * loop->count;
			memory -= loop->memory * loop->count;
			step[i] = 0;
		}
	}
	return to;
}

static int check_tensor(const struct pen_model *model, const struct pen_tensor *tensor,
			struct pen_error *err)
{
	const struct pen_model_file *file;
	uint64_t stored;

	if (tensor->file >= model->file_count)
		return refuse(err, tensor, "Take tensors from this model's pen_model_tensors()",
			      "the model has no file %u", tensor->file);
	file = &model->files[tensor->file];
	stored = tensor->coded ? tensor->coded : tensor->bytes;
	if (tensor->offset > file->size || stored > file->size - tensor->offset)
		return refuse(err, tensor, "Take tensors from this model's pen_model_tensors()",
			      "it does not lie in %s", file->name);
	return 0;
}

/* How many extents the placements become, each of them checked. */
static int count_extents(const struct pen_model *model, const struct pen_placement *placements,
			 size_t count, size_t *extents, struct pen_error *err)
{
	*extents = 0;
	for (size_t i = 0; i < count; i++) {
		struct box box;
		int rc = make_box(&box, &placements[i], err);

		if (!rc)
			rc = check_tensor(model, placements[i].tensor, err);
		if (rc)
			return rc;
		if (__builtin_add_overflow(*extents, box.extents, extents))
			return error_sys(err, -ENOMEM, "load", "the tensors", -1);
	}
	return 0;
}

int load_extents(const struct pen_model *model, const struct pen_placement *placements,
		 size_t count, struct pen_extent **extents, size_t *extent_count,
		 struct pen_error *err)
{
	struct pen_extent *next;
	int rc = count_extents(model, placements, count, extent_count, err);

	*extents = NULL;
	if (rc)
		return rc;
	*extents = next = os_calloc(*extent_count + 1, sizeof(*next));
	if (!next)
		return error_sys(err, -ENOMEM, "load", "the tensors", -1);
	for (size_t i = 0; i < count; i++) {
		const struct pen_tensor *tensor = placements[i].tensor;
		struct box box;

		make_box(&box, &placements[i], NULL);
		if (!box.extents)
			continue;
		next = put_extents(&box, (struct pen_extent){
			.object = model->files[tensor->file].object,
			.offset = tensor->offset + box.start,
			.memory = placements[i].memory,
			.device = placements[i].device,
			.group = i,
			.form = placements[i].form,
		}, next);
	}
	return 0;
}

/* ------------------------------------------------------------------------------ coded ones -- */

static bool any_coded(const struct pen_placement *placements, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (placements[i].tensor && placements[i].tensor->coded)
			return true;
	return false;
}

/* Turn extents of coded tensors into extents of their chunks. */
static int add_codings(struct coded_load *load, const struct pen_placement *placements,
		       struct pen_extent *extents, size_t count, struct pen_error *err)
{
	int rc = 0;

	for (size_t i = 0; i < count && !rc; i++) {
		const struct pen_tensor *tensor = placements[extents[i].group].tensor;

		if (tensor->coded && (!i || extents[i].group != extents[i - 1].group))
			rc = coded_load_want(load, tensor, err);
	}
	if (!rc)
		rc = coded_load_read(load, err);
	for (size_t i = 0; i < count && !rc; i++) {
		const struct pen_placement *placement = &placements[extents[i].group];

		if (!placement->tensor->coded)
			continue;
		extents[i].offset -= placement->tensor->offset;
		rc = coded_load_add(load, placement->tensor, form_of(placement->form), i,
				    &extents[i], err);
	}
	return rc;
}

static int start_coded(struct pen_model *model, struct pen_device *device,
		       const struct pen_placement *placements, struct pen_extent *extents,
		       size_t extent_count, const struct pen_options *options,
		       struct pen_job **job, struct pen_error *err)
{
	struct job_coded coded = { .free = coded_load_free };
	struct coded_load *load;
	int rc = coded_load_new(model, extent_count, &load, err);

	if (!rc)
		rc = add_codings(load, placements, extents, extent_count, err);
	if (!rc) {
		coded.codings = coded_load_codings(load);
		coded.context = load;
		rc = job_start_coded(device, extents, extent_count, options, &coded, job, err);
	}
	if (rc)
		coded_load_free(load);
	return rc;
}

int pen_load_start(struct pen_model *model, struct pen_device *device,
		   const struct pen_placement *placements, size_t count,
		   const struct pen_options *options, struct pen_job **job,
		   struct pen_error *err)
{
	struct pen_extent *extents;
	size_t extent_count;
	int rc;

	*job = NULL;
	error_clear(err);
	rc = load_extents(model, placements, count, &extents, &extent_count, err);
	if (!rc && any_coded(placements, count))
		rc = start_coded(model, device, placements, extents, extent_count, options, job,
				 err);
	else if (!rc)
		rc = pen_job_start(PEN_READ, device, extents, extent_count, options, job, err);
	free(extents);
	return rc;
}
