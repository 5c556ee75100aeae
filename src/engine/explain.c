/* SPDX-License-Identifier: MIT */
/*
 * What the engine would do with an object here. It asks the same chooser that a job asks, with a
 * pretended extent over the whole object, and reads the answer off the schedule it gets.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "engine/schedule.h"
#include "io/object.h"
#include "sys/os.h"

/* Where the pretended memory lies; nothing is ever read from or written to it. */
#define PRETENDED ((void *)(uintptr_t)(2u << 20))

static void name_side(const struct schedule *schedule, enum path_side side, char *name, size_t size)
{
	for (unsigned int i = 0; i < schedule->path_count; i++)
		if (schedule->paths[i].side == side)
			text_copy(name, size, schedule->paths[i].kind->name);
}

/* One range for each stretch of the object that stays in one list. */
static int fill_ranges(struct pen_explanation *answer, struct pen_object *object,
		       const struct schedule *schedule)
{
	const struct plan_request *requests = schedule->plan->requests;
	size_t at[SIDES] = { 0, 0 };
	struct pen_range *range = NULL;
	enum path_side current = SIDES;

	/* No more stretches than requests. */
	answer->ranges = os_calloc(schedule->plan->request_count + 1, sizeof(answer->ranges[0]));
	if (!answer->ranges)
		return -ENOMEM;
	for (size_t i = 0; i < schedule->plan->request_count; i++) {
		const struct work *around = &schedule->work[AROUND];
		enum path_side side =
			at[AROUND] < around->count && around->requests[at[AROUND]] == i ? AROUND
										: THROUGH;
		uint64_t resident = 0;

		at[side]++;
		if (side != current) {
			range = &answer->ranges[answer->range_count++];
			range->offset = requests[i].offset;
			name_side(schedule, side, range->path, sizeof(range->path));
			current = side;
		}
		range->length = requests[i].offset + requests[i].length - range->offset;
		object_residency(object, requests[i].offset, requests[i].length, &resident, NULL);
		range->resident += resident;
		answer->resident += resident;
	}
	return 0;
}

static void fill_paths(struct pen_explanation *answer, const struct schedule *schedule)
{
	for (unsigned int i = 0; i < schedule->path_count; i++) {
		struct pen_path *entry = &answer->paths[answer->path_count++];

		text_copy(entry->path, sizeof(entry->path), schedule->paths[i].kind->name);
		text_copy(entry->reason, sizeof(entry->reason), schedule->paths[i].reason);
		entry->bytes = schedule->work[schedule->paths[i].side].bytes;
		answer->lanes += schedule->paths[i].lanes;
	}
	answer->refused_count = schedule->refused_count;
	memcpy(answer->refused, schedule->refused, sizeof(answer->refused));
}

int pen_explain(struct pen_object *object, struct pen_device *device,
		const struct pen_options *options, struct pen_explanation **explanation,
		struct pen_error *err)
{
	struct pen_extent whole = { .object = object, .memory = PRETENDED };
	struct pen_explanation *answer;
	struct pen_options full;
	struct schedule *schedule;
	int rc;

	error_clear(err);
	*explanation = NULL;
	rc = schedule_options(options, &full, err);
	if (rc)
		return rc;
	if (object->info.size == UINT64_MAX)
		return error_set(err, -EINVAL, "explain", object->name, -1, "it has no end");
	whole.length = object->info.size;
	rc = schedule_new(PEN_READ, device, &whole, NULL, 1, &full, &schedule, err);
	if (rc)
		return rc;
	answer = os_calloc(1, sizeof(*answer));
	if (!answer || fill_ranges(answer, object, schedule)) {
		pen_explain_free(answer);
		schedule_free(schedule);
		return error_sys(err, -ENOMEM, "explain", object->name, -1);
	}
	fill_paths(answer, schedule);
	answer->bytes = object->info.size;
	answer->memory_limit = full.memory_limit;
	answer->memory_alignment = object->info.memory_align;
	answer->offset_alignment = object->info.offset_align;
	text_copy(answer->filesystem, sizeof(answer->filesystem), object->info.filesystem);
	text_copy(answer->store, sizeof(answer->store), object->info.store);
	text_copy(answer->device, sizeof(answer->device), device->name);
	text_copy(answer->residency_by, sizeof(answer->residency_by),
		  object_residency_method(object));
	text_copy(answer->queue, sizeof(answer->queue),
		  queue_uring_probe(NULL) ? "threads" : "uring");
	schedule_free(schedule);
	*explanation = answer;
	return 0;
}

void pen_explain_free(struct pen_explanation *explanation)
{
	if (!explanation)
		return;
	free(explanation->ranges);
	free(explanation);
}
