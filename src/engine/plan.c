/* SPDX-License-Identifier: MIT */
/* Making a plan: check, flatten, sort, merge into runs, cut into requests; see plan.h. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "engine/plan.h"
#include "io/object.h"
#include "sys/os.h"

/* Beyond this the driver refuses a pitch. */
#define PITCH_MAX 0x7fffffffull

/* One row of one extent. */
struct flat {
	uint64_t offset, length;
	unsigned char *memory;
	uint64_t group;
	uint64_t allocation;
	uint32_t object;
};

struct maker {
	const struct plan_wishes *wishes;
	struct plan *plan;
	struct flat *flats;
	size_t flat_count;
	size_t *active;		/* flats that reach into the request being cut; room for all */
	struct pen_error *err;
};

/* Room for one more element; grows by doubling. */
static int make_room(void **array, size_t *room, size_t count, size_t element)
{
	size_t wanted = *room ? *room * 2 : 64;
	void *grown;

	if (count < *room)
		return 0;
	grown = os_realloc(*array, wanted, element);
	if (!grown)
		return -ENOMEM;
	*array = grown;
	*room = wanted;
	return 0;
}

static int no_memory(struct maker *maker)
{
	return error_sys(maker->err, -ENOMEM, "plan", "the transfer", -1);
}

static uint64_t rows_of(const struct pen_extent *extent)
{
	return extent->rows > 1 ? extent->rows : 1;
}

/* Last byte's end of a strided stretch; false on overflow. */
static bool stretch_end(uint64_t start, uint64_t length, uint64_t rows, uint64_t pitch,
			uint64_t *end)
{
	uint64_t skip;

	return !__builtin_mul_overflow(rows - 1, pitch, &skip) &&
	       !__builtin_add_overflow(start, skip, end) &&
	       !__builtin_add_overflow(*end, length, end) && *end <= INT64_MAX;
}

static int check_extent(struct maker *maker, const struct pen_extent *extent, size_t index)
{
	struct pen_object *object = extent->object;
	const char *operation = maker->wishes->write ? "plan a write to" : "plan a read of";
	uint64_t rows = rows_of(extent), end, memory_end;

	if (!object)
		return error_set(maker->err, -EINVAL, operation, "", -1, "extent %zu has no object",
				 index);
	for (size_t i = 0; i < sizeof(extent->reserved) / sizeof(extent->reserved[0]); i++)
		if (extent->reserved[i])
			return error_set(maker->err, -EINVAL, operation, object->name,
					 (int64_t)extent->offset,
					 "extent %zu has reserved fields that are not zero", index);
	if (extent->device || extent->flags)
		return error_set(maker->err, -ENOTSUP, operation, object->name,
				 (int64_t)extent->offset,
				 "extent %zu names a device or is a fill", index);
	if (maker->wishes->write != (object->mode != PEN_READ))
		return error_set(maker->err, -EBADF, operation, object->name, -1,
				 "it was opened for %s",
				 object->mode == PEN_READ ? "reading" : "writing");
	if (object->committed)
		return error_set(maker->err, -EBADF, operation, object->name, -1,
				 "it is committed already");
	if (rows > 1 && (extent->object_pitch < extent->length ||
			 extent->memory_pitch < extent->length))
		return error_set(maker->err, -EINVAL, operation, object->name,
				 (int64_t)extent->offset,
				 "extent %zu has a pitch smaller than its rows", index);
	if (!stretch_end(extent->offset, extent->length, rows, extent->object_pitch, &end) ||
	    !stretch_end((uintptr_t)extent->memory, extent->length, rows, extent->memory_pitch,
			 &memory_end))
		return error_set(maker->err, -EOVERFLOW, operation, object->name, -1,
				 "extent %zu is larger than any file or memory", index);
	if (maker->wishes->groups && extent->group >= maker->wishes->groups)
		return error_set(maker->err, -EINVAL, operation, object->name,
				 (int64_t)extent->offset,
				 "extent %zu is of group %llu of %llu", index,
				 (unsigned long long)extent->group,
				 (unsigned long long)maker->wishes->groups);
	if (!extent->length)
		return 0;
	if (!extent->memory && !maker->wishes->relative)
		return error_set(maker->err, -EFAULT, operation, object->name,
				 (int64_t)extent->offset, "extent %zu has no memory", index);
	if (maker->wishes->relative && memory_end > maker->wishes->relative_size)
		return error_set(maker->err, -ERANGE, operation, object->name,
				 (int64_t)extent->offset,
				 "extent %zu ends beyond the memory to allocate", index);
	if (end > object->info.size && (!maker->wishes->write || object->info.size)) {
		error_set(maker->err, -ERANGE, operation, object->name, (int64_t)extent->offset,
			  "extent %zu ends at byte %llu, the object at %llu", index,
			  (unsigned long long)end, (unsigned long long)object->info.size);
		error_hint(maker->err, maker->wishes->write ? "Open it with the size it will have"
							     : "The file may have been cut short");
		return -ERANGE;
	}
	return 0;
}

/* The object's index in the plan; extents mostly name the same one again. */
static int object_index(struct maker *maker, struct pen_object *object, uint32_t *index)
{
	struct plan *plan = maker->plan;
	size_t i;

	if (plan->object_count && plan->objects[*index] == object)
		return 0;
	for (i = 0; i < plan->object_count; i++)
		if (plan->objects[i] == object)
			break;
	*index = (uint32_t)i;
	if (i < plan->object_count)
		return 0;
	if (make_room((void **)&plan->objects, &plan->object_room, plan->object_count,
		      sizeof(plan->objects[0])))
		return no_memory(maker);
	if (plan->object_count && object->ops->transport != plan->objects[0]->ops->transport)
		return error_set(maker->err, -EINVAL, "plan", object->name, -1,
				 "one transfer cannot mix %s and %s objects",
				 plan->objects[0]->ops->kind, object->ops->kind);
	plan->objects[plan->object_count++] = object;
	return 0;
}

static int flatten(struct maker *maker, const struct pen_extent *extents, size_t count)
{
	uintptr_t base = maker->wishes->relative ? PLAN_RELATIVE : 0;
	size_t total = 0;
	uint32_t object = 0;
	int rc;

	for (size_t i = 0; i < count; i++) {
		rc = check_extent(maker, &extents[i], i);
		if (rc)
			return rc;
		if (extents[i].length &&
		    __builtin_add_overflow(total, rows_of(&extents[i]), &total))
			return no_memory(maker);
	}
	maker->flats = os_calloc(total ? total : 1, sizeof(maker->flats[0]));
	maker->active = os_calloc(total ? total : 1, sizeof(maker->active[0]));
	if (!maker->flats || !maker->active)
		return no_memory(maker);
	for (size_t i = 0; i < count; i++) {
		const struct pen_extent *extent = &extents[i];

		if (!extent->length)
			continue;
		rc = object_index(maker, extent->object, &object);
		if (rc)
			return rc;
		for (uint64_t row = 0; row < rows_of(extent); row++) {
			struct flat *flat = &maker->flats[maker->flat_count++];

			flat->offset = extent->offset + row * extent->object_pitch;
			flat->length = extent->length;
			flat->memory = (unsigned char *)(base + (uintptr_t)extent->memory +
							 row * extent->memory_pitch);
			flat->group = extent->group;
			flat->allocation = maker->wishes->one_memory ? 0 : i;
			flat->object = object;
			maker->plan->bytes += extent->length;
		}
	}
	return 0;
}

static int by_place(const void *left, const void *right)
{
	const struct flat *a = left, *b = right;

	if (a->object != b->object)
		return a->object < b->object ? -1 : 1;
	if (a->offset != b->offset)
		return a->offset < b->offset ? -1 : 1;
	return a->length < b->length ? -1 : a->length > b->length;
}

static void sort(struct maker *maker)
{
	/* What comes from a file's own table is sorted already. */
	for (size_t i = 1; i < maker->flat_count; i++)
		if (by_place(&maker->flats[i - 1], &maker->flats[i]) > 0) {
			qsort(maker->flats, maker->flat_count, sizeof(maker->flats[0]), by_place);
			return;
		}
}

/* Add a copy to the request being made, folding it into the last one where they form one
 * stretch, or rows at a constant distance. */
static int add_copy(struct maker *maker, struct plan_request *request, uint64_t at,
		    unsigned char *memory, uint64_t width, uint64_t allocation)
{
	struct plan *plan = maker->plan;
	struct plan_copy *last = request->copy_count ? &plan->copies[plan->copy_count - 1] : NULL;

	if (last && last->allocation != allocation)
		last = NULL;
	if (last && last->rows == 1 && last->at + last->width == at &&
	    last->memory + last->width == memory) {
		last->width += width;
		return 0;
	}
	if (last && last->width == width && !maker->wishes->placed) {
		uint64_t rows = last->rows;
		uint64_t at_pitch = rows > 1 ? last->at_pitch : at - last->at;
		uint64_t memory_pitch = rows > 1 ? last->memory_pitch
						 : (uint64_t)(memory - last->memory);

		if (at_pitch >= width && at_pitch <= PITCH_MAX && memory_pitch >= width &&
		    memory_pitch <= PITCH_MAX && at == last->at + rows * at_pitch &&
		    memory == last->memory + rows * memory_pitch) {
			last->rows++;
			last->at_pitch = at_pitch;
			last->memory_pitch = memory_pitch;
			return 0;
		}
	}
	if (plan->copy_count == UINT32_MAX ||
	    make_room((void **)&plan->copies, &plan->copy_room, plan->copy_count,
		      sizeof(plan->copies[0])))
		return no_memory(maker);
	plan->copies[plan->copy_count++] = (struct plan_copy){
		.at = at, .memory = memory, .width = width, .rows = 1, .allocation = allocation,
	};
	request->copy_count++;
	return 0;
}

/* Note that `bytes` of the request being made belong to `group`. */
static int add_mark(struct maker *maker, struct plan_request *request, uint64_t group,
		    uint64_t bytes)
{
	struct plan *plan = maker->plan;

	if (!maker->wishes->groups)
		return 0;
	if (request->mark_count && plan->marks[plan->mark_count - 1].group == group) {
		plan->marks[plan->mark_count - 1].bytes += bytes;
		return 0;
	}
	if (plan->mark_count == UINT32_MAX ||
	    make_room((void **)&plan->marks, &plan->mark_room, plan->mark_count,
		      sizeof(plan->marks[0])))
		return no_memory(maker);
	plan->marks[plan->mark_count++] = (struct plan_mark){ group, bytes };
	request->mark_count++;
	return 0;
}

/* Where a request that starts at `from` must end at the latest. */
static uint64_t cut_after(struct maker *maker, uint64_t from, uint64_t end, uint32_t align,
			  bool *edge)
{
	uint64_t unit = maker->wishes->unit, cut = (from / unit + 1) * unit;

	*edge = false;
	if (cut > end)
		cut = end;
	if (!maker->wishes->write || !align)
		return cut;
	/* A write keeps its ragged ends apart, so that all between can go direct. */
	if (from % align) {
		uint64_t next = (from / align + 1) * align;

		*edge = true;
		return next < cut ? next : cut;
	}
	if (cut % align) {
		uint64_t whole = cut / align * align;

		if (whole > from)
			return whole;
		*edge = true;
	}
	return cut;
}

/* Copies for each active flat's part of the request, which ends at `to`; those that end there are
 * active no longer. */
static int add_copies(struct maker *maker, struct plan_request *request, uint64_t to,
		      size_t *active)
{
	uint64_t from = request->offset;
	size_t kept = 0;

	for (size_t i = 0; i < *active; i++) {
		const struct flat *flat = &maker->flats[maker->active[i]];
		uint64_t begin = flat->offset > from ? flat->offset : from;
		uint64_t stop = flat->offset + flat->length;
		int rc;

		if (stop > to) {
			maker->active[kept++] = maker->active[i];
			stop = to;
		}
		rc = add_copy(maker, request, begin - from, flat->memory + (begin - flat->offset),
			      stop - begin, flat->allocation);
		if (!rc)
			rc = add_mark(maker, request, flat->group, stop - begin);
		if (rc)
			return rc;
	}
	*active = kept;
	return 0;
}

/* Cut the run [start, end), filled by flats [first, last), into requests. */
static int cut_run(struct maker *maker, size_t first, size_t last, uint64_t start, uint64_t end)
{
	struct plan *plan = maker->plan;
	uint32_t object = maker->flats[first].object;
	uint32_t align = plan->objects[object]->info.offset_align;
	uint64_t from = start, to;
	size_t active = 0, next = first;
	int rc;

	for (; from < end; from = to) {
		struct plan_request *request;
		bool edge;

		to = cut_after(maker, from, end, align, &edge);
		if (plan->request_count == UINT32_MAX ||
		    make_room((void **)&plan->requests, &plan->request_room, plan->request_count,
			      sizeof(plan->requests[0])))
			return no_memory(maker);
		request = &plan->requests[plan->request_count];
		*request = (struct plan_request){
			.offset = from,
			.length = (uint32_t)(to - from),
			.object = object,
			.first_copy = (uint32_t)plan->copy_count,
			.first_mark = (uint32_t)plan->mark_count,
			.edge = edge,
		};
		while (next < last && maker->flats[next].offset < to)
			maker->active[active++] = next++;
		rc = add_copies(maker, request, to, &active);
		if (rc)
			return rc;
		/* A window that falls wholly into a hole is not read. */
		if (request->copy_count)
			plan->request_count++;
	}
	return 0;
}

static bool joins(struct maker *maker, const struct flat *last, const struct flat *next,
		  uint64_t end)
{
	if (next->object != last->object)
		return false;
	if (maker->wishes->placed)
		return next->offset == end && next->memory == last->memory + last->length &&
		       next->allocation == last->allocation;
	if (maker->wishes->write)
		return next->offset == end;
	return next->offset <= end || next->offset - end <= maker->wishes->gap;
}

static int cut(struct maker *maker)
{
	size_t first = 0;

	while (first < maker->flat_count) {
		const struct flat *flats = maker->flats;
		uint64_t end = flats[first].offset + flats[first].length;
		size_t last = first + 1;
		int rc;

		for (; last < maker->flat_count; last++) {
			const struct flat *next = &flats[last];

			if (maker->wishes->write && next->object == flats[first].object &&
			    next->offset < end) {
				const char *name = maker->plan->objects[next->object]->name;

				error_set(maker->err, -EINVAL, "plan a write to", name,
					  (int64_t)next->offset,
					  "two extents write the same bytes");
				error_hint(maker->err,
					   "Give each byte of the object to one extent");
				return -EINVAL;
			}
			if (!joins(maker, &flats[last - 1], next, end))
				break;
			if (next->offset + next->length > end)
				end = next->offset + next->length;
		}
		rc = cut_run(maker, first, last, flats[first].offset, end);
		if (rc)
			return rc;
		first = last;
	}
	return 0;
}

int plan_new(const struct pen_extent *extents, size_t count, const struct plan_wishes *wishes,
	     struct plan **plan, struct pen_error *err)
{
	struct maker maker = { .wishes = wishes, .err = err };
	int rc;

	assert(wishes->unit && !(wishes->unit & (wishes->unit - 1)) && wishes->unit <= UINT32_MAX);
	*plan = NULL;
	maker.plan = os_calloc(1, sizeof(*maker.plan));
	if (!maker.plan)
		return no_memory(&maker);
	rc = flatten(&maker, extents, count);
	if (!rc) {
		sort(&maker);
		rc = cut(&maker);
	}
	free(maker.flats);
	free(maker.active);
	if (rc) {
		plan_free(maker.plan);
		return rc;
	}
	*plan = maker.plan;
	return 0;
}

void plan_free(struct plan *plan)
{
	if (!plan)
		return;
	free(plan->objects);
	free(plan->requests);
	free(plan->copies);
	free(plan->marks);
	free(plan);
}
