/* SPDX-License-Identifier: MIT */
/*
 * The copies between a transit's buffer and memory: what goes on from one another is made as one,
 * the host's are made at once, a GPU's queued on the job's stream there with a fence behind them.
 */
#include <string.h>
#include "engine/job.h"
#include "engine/lane.h"

/* Copies that go on from one another, to be made as one. */
struct pending {
	struct device_copy copy;	/* rows 0: none */
	uint32_t place, device;
};

static int flush(struct lane *lane, struct pending *pending, struct pen_error *err)
{
	struct job_device *device = &lane->job->devices[pending->device];
	int rc = 0;

	if (!pending->copy.rows)
		return 0;
	if (!device->device->is_host)
		rc = lane_enter(lane, pending->device, err);
	if (!rc)
		rc = device_copy(device->device, &device->stream, &pending->copy, err);
	pending->copy.rows = 0;
	return rc;
}

/* One copy of the plan, between memory and the buffer, in which its request begins at `base`. */
static int add_copy(struct lane *lane, struct pending *pending, const struct plan_copy *copy,
		    unsigned char *base, struct pen_error *err)
{
	const struct plan *plan = lane->job->schedule->plan;
	unsigned char *host = base + copy->at, *memory;
	int rc;

	if (copy->place == PLACE_FILL) {
		memset(host, (int)copy->offset, copy->width);
		return 0;
	}
	memory = plan_memory(plan, copy);
	if (pending->copy.rows == 1 && copy->rows == 1 && pending->place == copy->place &&
	    pending->copy.memory + pending->copy.width == memory &&
	    pending->copy.host + pending->copy.width == host) {
		pending->copy.width += copy->width;
		return 0;
	}
	rc = flush(lane, pending, err);
	pending->place = copy->place;
	pending->device = plan->places[copy->place].device;
	pending->copy = (struct device_copy){
		.memory = memory,
		.host = host,
		.width = copy->width,
		.rows = copy->rows,
		.memory_pitch = copy->memory_pitch,
		.host_pitch = copy->at_pitch,
		.to_device = !lane_writes(lane),
	};
	return rc;
}

int copies_queue(struct lane *lane, struct transit *transit, struct pen_error *err)
{
	const struct plan *plan = lane->job->schedule->plan;
	struct pending pending = { .copy.rows = 0 };
	int rc;

	for (uint32_t i = 0; i < transit->range.count; i++) {
		const struct plan_request *request = &plan->requests[transit->range.first + i];
		unsigned char *base = transit->buffer + (request->offset - transit->start);

		for (uint32_t c = 0; c < request->copy_count; c++) {
			rc = add_copy(lane, &pending, &plan->copies[request->first_copy + c], base,
				      err);
			if (rc)
				return rc;
		}
	}
	rc = flush(lane, &pending, err);
	for (uint32_t left = transit->devices; left && !rc; left &= left - 1) {
		unsigned int d = (unsigned int)__builtin_ctz(left);
		struct job_device *device = &lane->job->devices[d];

		rc = lane_enter(lane, d, err);
		if (!rc)
			rc = device_mark(device->device, &device->stream,
					 &lane->fences[transit->fences][d], err);
	}
	return rc;
}
