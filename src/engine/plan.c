/* SPDX-License-Identifier: MIT */
/* Making a plan: check, flatten, sort, merge into runs, cut into requests; see plan.h. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "engine/plan.h"
#include "io/object.h"
#include "mem/device.h"
#include "sys/os.h"

/* Beyond this the driver refuses a pitch. */
#define PITCH_MAX 0x7fffffffull

/* One row of one extent. */
struct flat {
	uint64_t offset, length;
	uint64_t memory;	/* in the place, or the byte to fill with */
	uint64_t group;
	uint32_t object, place, form;
	const struct coding *coding;
	bool on_gpu;
};

/* A table of the objects by their address, open addressing. */
struct object_table {
	struct entry {
		const struct pen_object *object;
		uint32_t index;
	} *entries;
	size_t room;		/* a power of two, more than half of it free */
};

struct maker {
	const struct plan_wishes *wishes;
	const struct pen_extent *extents;
	struct plan *plan;
	struct flat *flats;
	size_t flat_count;
	size_t *active;		/* flats that reach into the request being cut; room for all */
	struct object_table table;
	uint32_t host_place[PLAN_DEVICES];	/* the place of each host device + 1; 0: none yet */
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

static const struct coding *coding_of(const struct maker *maker, const struct pen_extent *extent)
{
	return maker->wishes->codings ? maker->wishes->codings[extent - maker->extents] : NULL;
}

/* Bytes that a row takes in memory, from its first to its last. */
static uint64_t memory_length(const struct maker *maker, const struct pen_extent *extent)
{
	const struct coding *coding = coding_of(maker, extent);

	return coding ? coding_span(coding) : form_bytes(form_of(extent->form), extent->length);
}

/* Bytes that an extent brings to memory, or takes from there. */
static uint64_t memory_bytes(const struct maker *maker, const struct pen_extent *extent)
{
	const struct coding *coding = coding_of(maker, extent);

	return coding ? coding->rows * coding->length * coding_value_size(coding)
		      : rows_of(extent) * memory_length(maker, extent);
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

static struct pen_device *device_of(const struct maker *maker, const struct pen_extent *extent)
{
	return extent->device ? extent->device : maker->wishes->device;
}

/* Is the extent's memory an offset into what the job will allocate? */
static bool is_relative(const struct maker *maker, const struct pen_extent *extent)
{
	return maker->wishes->allocate && device_of(maker, extent) == maker->wishes->device;
}

static int check_fields(struct maker *maker, const char *operation,
			const struct pen_extent *extent, size_t index)
{
	const char *name = extent->object->name;
	int64_t offset = (int64_t)extent->offset;

	for (size_t i = 0; i < sizeof(extent->reserved) / sizeof(extent->reserved[0]); i++)
		if (extent->reserved[i])
			return error_set(maker->err, -EINVAL, operation, name, offset,
					 "extent %zu has reserved fields that are not zero", index);
	if (extent->form && !form_of(extent->form))
		return error_set(maker->err, -EINVAL, operation, name, offset,
				 "extent %zu has a form that is not known", index);
	if (extent->flags & ~PEN_FILL)
		return error_set(maker->err, -EINVAL, operation, name, offset,
				 "extent %zu has flags that are not known", index);
	if (!(extent->flags & PEN_FILL))
		return 0;
	if (!maker->wishes->write || extent->memory || extent->device || extent->fill > 255)
		return error_set(maker->err, -EINVAL, operation, name, offset,
				 "extent %zu fills: that is for writes, with a byte and no memory",
				 index);
	return 0;
}

/* No number may be cut in two, by requests neither, which begin and end at round offsets. */
static int check_form(struct maker *maker, const char *operation, const struct pen_extent *extent,
		      size_t index)
{
	const struct coding *coding = coding_of(maker, extent);
	const struct form *form = coding ? coding->form : form_of(extent->form);
	bool rows = rows_of(extent) > 1;
	uint64_t from, to;

	if (!form)
		return 0;
	if (maker->wishes->write)
		return error_set(maker->err, -EINVAL, operation, extent->object->name,
				 (int64_t)extent->offset,
				 "extent %zu changes its form: that is for reads", index);
	from = extent->offset | extent->length | (rows ? extent->object_pitch : 0);
	to = (uintptr_t)extent->memory | (rows ? extent->memory_pitch : 0);
	/* Chunks hold whole numbers. */
	if (coding) {
		from = 0;
		to |= coding->memory_pitch;
	}
	if (from % form->from_size || to % form->to_size) {
		error_set(maker->err, -EINVAL, operation, extent->object->name,
			  (int64_t)extent->offset,
			  "extent %zu does not begin and end with whole numbers at multiples of "
			  "their size", index);
		error_hint(maker->err, "Load it as it is, and change its dtype afterwards");
		return -EINVAL;
	}
	return 0;
}

/* Memory, and the object's end. */
static int check_ends(struct maker *maker, const char *operation, const struct pen_extent *extent,
		      size_t index)
{
	struct pen_object *object = extent->object;
	uint64_t rows = rows_of(extent), end, memory_end;

	if (!stretch_end(extent->offset, extent->length, rows, extent->object_pitch, &end) ||
	    !stretch_end((uintptr_t)extent->memory, memory_length(maker, extent), rows,
			 extent->memory_pitch, &memory_end))
		return error_set(maker->err, -EOVERFLOW, operation, object->name, -1,
				 "extent %zu is larger than any file or memory", index);
	if (!extent->length)
		return 0;
	if (!extent->memory && !is_relative(maker, extent) && !(extent->flags & PEN_FILL))
		return error_set(maker->err, -EFAULT, operation, object->name,
				 (int64_t)extent->offset, "extent %zu has no memory", index);
	if (is_relative(maker, extent) && memory_end > maker->wishes->allocate)
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

static int check_extent(struct maker *maker, const struct pen_extent *extent, size_t index)
{
	struct pen_object *object = extent->object;
	const char *operation = maker->wishes->write ? "plan a write to" : "plan a read of";
	int rc;

	if (!object)
		return error_set(maker->err, -EINVAL, operation, "", -1, "extent %zu has no object",
				 index);
	rc = check_fields(maker, operation, extent, index);
	if (rc)
		return rc;
	if (maker->wishes->write != (object->mode != PEN_READ))
		return error_set(maker->err, -EBADF, operation, object->name, -1,
				 "it was opened for %s",
				 object->mode == PEN_READ ? "reading" : "writing");
	if (object->committed)
		return error_set(maker->err, -EBADF, operation, object->name, -1,
				 "it is committed already");
	if (rows_of(extent) > 1 &&
	    (extent->object_pitch < extent->length ||
	     (extent->memory_pitch < memory_length(maker, extent) &&
	      !(extent->flags & PEN_FILL))))
		return error_set(maker->err, -EINVAL, operation, object->name,
				 (int64_t)extent->offset,
				 "extent %zu has a pitch smaller than its rows", index);
	if (maker->wishes->groups && extent->group >= maker->wishes->groups)
		return error_set(maker->err, -EINVAL, operation, object->name,
				 (int64_t)extent->offset,
				 "extent %zu is of group %llu of %llu", index,
				 (unsigned long long)extent->group,
				 (unsigned long long)maker->wishes->groups);
	rc = check_form(maker, operation, extent, index);
	return rc ? rc : check_ends(maker, operation, extent, index);
}

/* ------------------------------------------------------------- objects, devices, places -- */

/* Where an object is in the table, or would be. */
static struct entry *find_entry(struct object_table *table, const struct pen_object *object)
{
	size_t at = (size_t)((uintptr_t)object * 0x9e3779b97f4a7c15ull >> 20);

	for (;; at++) {
		struct entry *entry = &table->entries[at & (table->room - 1)];

		if (!entry->object || entry->object == object)
			return entry;
	}
}

static int grow_table(struct object_table *table)
{
	struct object_table grown = { .room = table->room ? table->room * 4 : 64 };

	grown.entries = os_calloc(grown.room, sizeof(grown.entries[0]));
	if (!grown.entries)
		return -ENOMEM;
	for (size_t i = 0; i < table->room; i++)
		if (table->entries[i].object)
			*find_entry(&grown, table->entries[i].object) = table->entries[i];
	free(table->entries);
	*table = grown;
	return 0;
}

/* The object's index in the plan; extents mostly name the same one again. */
static int object_index(struct maker *maker, struct pen_object *object, uint32_t *index)
{
	struct plan *plan = maker->plan;
	struct entry *entry;

	if (plan->object_count && plan->objects[*index] == object)
		return 0;
	if (maker->table.room <= 2 * plan->object_count && grow_table(&maker->table))
		return no_memory(maker);
	entry = find_entry(&maker->table, object);
	*index = entry->index;
	if (entry->object)
		return 0;
	if (make_room((void **)&plan->objects, &plan->object_room, plan->object_count,
		      sizeof(plan->objects[0])))
		return no_memory(maker);
	if (plan->object_count && object->ops->transport != plan->objects[0]->ops->transport)
		return error_set(maker->err, -EINVAL, "plan", object->name, -1,
				 "one transfer cannot mix %s and %s objects",
				 plan->objects[0]->ops->kind, object->ops->kind);
	*index = (uint32_t)plan->object_count;
	*entry = (struct entry){ object, *index };
	plan->objects[plan->object_count++] = object;
	return 0;
}

static int device_index(struct maker *maker, struct pen_device *device, uint32_t *index)
{
	struct plan *plan = maker->plan;

	for (*index = 0; *index < plan->device_count; ++*index)
		if (plan->devices[*index] == device)
			return 0;
	if (plan->device_count == PLAN_DEVICES)
		return error_set(maker->err, -E2BIG, "plan", "the transfer", -1,
				 "one transfer cannot use more than %d devices", PLAN_DEVICES);
	plan->devices[plan->device_count++] = device;
	return 0;
}

static int add_place(struct maker *maker, uintptr_t base, uint32_t device, uint32_t *index)
{
	struct plan *plan = maker->plan;

	if (plan->place_count == PLACE_FILL ||
	    make_room((void **)&plan->places, &plan->place_room, plan->place_count,
		      sizeof(plan->places[0])))
		return no_memory(maker);
	*index = (uint32_t)plan->place_count++;
	plan->places[*index].base = base;
	plan->places[*index].device = device;
	return 0;
}

/* The place of an extent's memory, and where in it the memory begins. */
static int find_place(struct maker *maker, const struct pen_extent *extent, struct flat *flat)
{
	struct plan *plan = maker->plan;
	uintptr_t address = (uintptr_t)extent->memory;
	uint64_t bytes = memory_bytes(maker, extent);
	uint32_t device;
	int rc;

	if (extent->flags & PEN_FILL) {
		flat->place = PLACE_FILL;
		flat->memory = extent->fill;
		flat->on_gpu = false;
		plan->fill_bytes += bytes;
		return 0;
	}
	rc = device_index(maker, device_of(maker, extent), &device);
	if (rc)
		return rc;
	plan->device_bytes[device] += bytes;
	flat->on_gpu = !plan->devices[device]->is_host;
	flat->memory = address;
	/* The first place is what the job allocates. */
	if (is_relative(maker, extent)) {
		flat->place = 0;
		return 0;
	}
	if (flat->on_gpu) {
		flat->memory = 0;
		return add_place(maker, address, device, &flat->place);
	}
	if (!maker->host_place[device]) {
		rc = add_place(maker, 0, device, &flat->place);
		maker->host_place[device] = flat->place + 1;
		return rc;
	}
	flat->place = maker->host_place[device] - 1;
	return 0;
}

static int flatten(struct maker *maker, const struct pen_extent *extents, size_t count)
{
	size_t total = 0;
	uint32_t object = 0, first;
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
	rc = device_index(maker, maker->wishes->device, &first);
	if (!rc && maker->wishes->allocate)
		rc = add_place(maker, 0, first, &first);
	for (size_t i = 0; i < count && !rc; i++) {
		const struct pen_extent *extent = &extents[i];
		struct flat flat = { .length = extent->length, .group = extent->group,
				     .form = (uint32_t)extent->form,
				     .coding = coding_of(maker, extent) };

		if (!extent->length)
			continue;
		rc = object_index(maker, extent->object, &object);
		if (!rc)
			rc = find_place(maker, extent, &flat);
		flat.object = object;
		for (uint64_t row = 0; row < rows_of(extent) && !rc; row++) {
			flat.offset = extent->offset + row * extent->object_pitch;
			maker->flats[maker->flat_count++] = flat;
			if (flat.place != PLACE_FILL)
				flat.memory += extent->memory_pitch;
		}
		maker->plan->bytes += extent->length * rows_of(extent);
		if (flat.form || flat.coding)
			maker->plan->formed_bytes += extent->length * rows_of(extent);
		if (flat.coding)
			maker->plan->coded_bytes += extent->length;
	}
	return rc;
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

/* Do two stretches of a place, or of constant bytes, go on one after the other? */
static bool goes_on(uint32_t place, uint64_t offset, uint64_t width, uint32_t next_place,
		    uint64_t next_offset)
{
	return place == next_place &&
	       next_offset == (place == PLACE_FILL ? offset : offset + width);
}

/* Fold a copy into the last one where they form rows at a constant distance. */
static bool folds(struct plan_copy *last, const struct plan_copy *copy)
{
	uint64_t rows = last->rows;
	uint64_t at_pitch = rows > 1 ? last->at_pitch : copy->at - last->at;
	uint64_t memory_pitch = rows > 1 ? last->memory_pitch : copy->offset - last->offset;

	if (last->place != copy->place || last->place == PLACE_FILL || last->form != copy->form ||
	    last->coding || copy->coding ||
	    last->width != copy->width || at_pitch < copy->width || at_pitch > PITCH_MAX ||
	    memory_pitch < plan_memory_width(copy) || memory_pitch > PITCH_MAX ||
	    copy->at != last->at + rows * at_pitch ||
	    copy->offset != last->offset + rows * memory_pitch)
		return false;
	last->rows++;
	last->at_pitch = at_pitch;
	last->memory_pitch = memory_pitch;
	return true;
}

/* Add a copy to the request being made, as part of the last one where that can be. */
static int add_copy(struct maker *maker, struct plan_request *request, struct plan_copy copy)
{
	struct plan *plan = maker->plan;
	struct plan_copy *last = request->copy_count ? &plan->copies[plan->copy_count - 1] : NULL;

	if (last && last->rows == 1 && last->form == copy.form && !last->coding && !copy.coding &&
	    last->at + last->width == copy.at &&
	    goes_on(last->place, last->offset, plan_memory_width(last), copy.place, copy.offset)) {
		last->width += copy.width;
		return 0;
	}
	if (last && !maker->wishes->straight && folds(last, &copy))
		return 0;
	if (plan->copy_count == UINT32_MAX ||
	    make_room((void **)&plan->copies, &plan->copy_room, plan->copy_count,
		      sizeof(plan->copies[0])))
		return no_memory(maker);
	plan->copies[plan->copy_count++] = copy;
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

/* The copy of a flat's bytes from `begin` to `stop`, in a request that starts at `from`. */
static struct plan_copy make_copy(const struct flat *flat, uint64_t from, uint64_t begin,
				  uint64_t stop)
{
	struct plan_copy copy = {
		.at = begin - from,
		.offset = flat->memory,
		.width = stop - begin,
		.rows = 1,
		.place = flat->place,
		.form = flat->form,
		.coding = flat->coding,
	};

	if (flat->coding) {
		copy.chunk = coding_chunk_at(flat->coding, begin);
		copy.chunks = coding_chunk_at(flat->coding, stop - 1) + 1 - copy.chunk;
	} else if (flat->place != PLACE_FILL) {
		copy.offset += form_bytes(form_of(flat->form), begin - flat->offset);
	}
	return copy;
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
		/* It begins behind where the request came to end. */
		if (begin >= to)
			continue;
		rc = add_copy(maker, request, make_copy(flat, from, begin, stop));
		if (!rc)
			rc = add_mark(maker, request, flat->group, stop - begin);
		if (rc)
			return rc;
	}
	*active = kept;
	return 0;
}

/* Where a request that starts at `from` and would end at `to` ends, since a flat is coded. Flats of
 * one object that share bytes share the chunks. */
static uint64_t between_chunks(const struct flat *flat, uint64_t from, uint64_t to)
{
	uint64_t chunk, begin;

	if (!flat->coding || flat->offset >= to || flat->offset + flat->length <= to)
		return to;
	chunk = coding_chunk_at(flat->coding, to);
	begin = flat->coding->offsets[chunk];
	return begin > from ? begin : coding_chunk_end(flat->coding, chunk);
}

/* Where a request that starts at `from` ends at the latest. Among chunks it may be anywhere, but so
 * that it is no longer than a unit with the blocks around it: neighbours then make up any number of
 * units, as others do. */
static uint64_t latest_end(const struct maker *maker, uint32_t object, uint64_t from, size_t active)
{
	uint64_t unit = maker->wishes->unit;
	uint64_t blocks = 2 * (uint64_t)maker->plan->objects[object]->info.offset_align;

	for (size_t i = 0; i < active; i++) {
		const struct flat *flat = &maker->flats[maker->active[i]];

		if (flat->coding && flat->offset <= from)
			return from + (unit > blocks ? unit - blocks : 1);
	}
	return (from / unit + 1) * unit;
}

/* Cut the run [start, end), filled by flats [first, last), into requests. */
static int cut_run(struct maker *maker, size_t first, size_t last, uint64_t start, uint64_t end)
{
	struct plan *plan = maker->plan;
	uint32_t object = maker->flats[first].object;
	uint64_t from = start, to;
	size_t active = 0, next = first;
	int rc;

	for (; from < end; from = to) {
		struct plan_request *request;

		while (next < last && maker->flats[next].offset <= from)
			maker->active[active++] = next++;
		to = latest_end(maker, object, from, active);
		if (to > end)
			to = end;
		while (next < last && maker->flats[next].offset < to)
			maker->active[active++] = next++;
		for (size_t i = 0; i < active; i++)
			to = between_chunks(&maker->flats[maker->active[i]], from, to);
		/* A chunk that reaches beyond that may meet others there. */
		while (next < last && maker->flats[next].offset < to)
			maker->active[active++] = next++;
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
		};
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
	if (maker->wishes->straight && (last->on_gpu || next->on_gpu))
		return next->offset == end &&
		       goes_on(last->place, last->memory, last->length, next->place, next->memory);
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
	struct maker maker = { .wishes = wishes, .extents = extents, .err = err };
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
	free(maker.table.entries);
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
	free(plan->places);
	free(plan->requests);
	free(plan->copies);
	free(plan->marks);
	free(plan);
}

bool plan_is_stretch(const struct plan *plan, uint32_t request)
{
	const struct plan_request *whole = &plan->requests[request];
	const struct plan_copy *copy = &plan->copies[whole->first_copy];

	return whole->copy_count == 1 && copy->rows == 1 && copy->width == whole->length &&
	       copy->place != PLACE_FILL && !copy->form && !copy->coding;
}

bool plan_stretches_on(const struct plan *plan, uint32_t last, uint32_t next)
{
	const struct plan_copy *a = &plan->copies[plan->requests[last].first_copy];
	const struct plan_copy *b = &plan->copies[plan->requests[next].first_copy];

	return plan_is_stretch(plan, last) && plan_is_stretch(plan, next) &&
	       goes_on(a->place, a->offset, a->width, b->place, b->offset);
}

bool plan_on_gpu(const struct plan *plan, uint32_t request)
{
	return plan_is_stretch(plan, request) &&
	       !plan_device(plan, &plan->copies[plan->requests[request].first_copy])->is_host;
}
