/* SPDX-License-Identifier: MIT */
/*
 * What the engine would do with an object here. It asks the same chooser that a job asks, with a
 * pretended extent over the whole object, and reads the answer off the path it gets.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "engine/path.h"
#include "sys/os.h"

/* Where the pretended memory lies; nothing is ever read from or written to it. */
#define PRETENDED ((void *)(uintptr_t)(2u << 20))

static void name_list(const struct path *path, enum path_list list, char *name, size_t size)
{
	for (unsigned int i = 0; i < path->way_count; i++)
		if (path->ways[i].list == list)
			text_copy(name, size, path->ways[i].name);
}

/* One range for each stretch of the object that stays in one list. */
static int fill_ranges(struct pen_explanation *answer, struct pen_object *object,
		       const struct path *path)
{
	const struct plan_request *requests = path->plan->requests;
	size_t at[LISTS] = { 0, 0 };
	struct pen_range *range = NULL;
	enum path_list current = LISTS;

	/* No more stretches than requests. */
	answer->ranges = os_calloc(path->plan->request_count + 1, sizeof(answer->ranges[0]));
	if (!answer->ranges)
		return -ENOMEM;
	for (size_t i = 0; i < path->plan->request_count; i++) {
		const struct work *cold = &path->work[COLD];
		enum path_list list =
			at[COLD] < cold->count && cold->requests[at[COLD]] == i ? COLD : HOT;
		uint64_t resident = 0;

		at[list]++;
		if (list != current) {
			range = &answer->ranges[answer->range_count++];
			range->offset = requests[i].offset;
			name_list(path, list, range->path, sizeof(range->path));
			current = list;
		}
		range->length = requests[i].offset + requests[i].length - range->offset;
		object_residency(object, requests[i].offset, requests[i].length, &resident, NULL);
		range->resident += resident;
		answer->resident += resident;
	}
	return 0;
}

static void fill_paths(struct pen_explanation *answer, const struct path *path)
{
	for (unsigned int i = 0; i < path->way_count; i++) {
		struct pen_path *entry = &answer->paths[answer->path_count++];

		text_copy(entry->path, sizeof(entry->path), path->ways[i].name);
		text_copy(entry->reason, sizeof(entry->reason), path->ways[i].reason);
		entry->bytes = path->work[path->ways[i].list].bytes;
		answer->lanes += path->ways[i].lanes;
	}
	answer->refused_count = path->refused_count;
	memcpy(answer->refused, path->refused, sizeof(answer->refused));
}

int pen_explain(struct pen_object *object, struct pen_device *device,
		const struct pen_options *options, struct pen_explanation **explanation,
		struct pen_error *err)
{
	struct pen_extent whole = { .object = object, .memory = PRETENDED };
	struct pen_explanation *answer;
	struct pen_options full;
	struct path *path;
	int rc;

	error_clear(err);
	*explanation = NULL;
	rc = path_options(options, &full, err);
	if (rc)
		return rc;
	if (object->info.size == UINT64_MAX)
		return error_set(err, -EINVAL, "explain", object->name, -1, "it has no end");
	whole.length = object->info.size;
	rc = path_choose(PEN_READ, device, &whole, 1, &full, &path, err);
	if (rc)
		return rc;
	answer = os_calloc(1, sizeof(*answer));
	if (!answer || fill_ranges(answer, object, path)) {
		pen_explain_free(answer);
		path_free(path);
		return error_sys(err, -ENOMEM, "explain", object->name, -1);
	}
	fill_paths(answer, path);
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
	path_free(path);
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
