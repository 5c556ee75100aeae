/* SPDX-License-Identifier: MIT */
/*
 * The copies between a transit's buffer and memory: what goes on from one another is made as one,
 * the host's are made at once, a GPU's queued on the job's stream there with a fence behind them.
 * What is decoded or changes its form on the way does so in the same step (forms.c).
 */
#include <string.h>
#include "engine/job.h"
#include "engine/lane.h"

/* Copies that go on from one another, to be made as one. */
struct pending {
	struct device_copy copy;	/* rows 0: none */
	struct coding_part part;	/* the same for what is coded; count 0: none */
	uint32_t place, device;
};

static int flush(struct lane *lane, struct transit *transit, struct pending *pending,
		 struct pen_error *err)
{
	struct pen_device *device = lane->job->devices[pending->device].device;
	int rc = 0;

	if (!pending->copy.rows && !pending->part.count)
		return 0;
	if (!device->is_host)
		rc = lane_enter(lane, pending->device, err);
	if (!rc && pending->part.count)
		rc = forms_decode(lane, transit, pending->device, &pending->part, err);
	else if (!rc && pending->copy.form && !device->is_host)
		rc = forms_queue(lane, transit, pending->device, &pending->copy, err);
	else if (!rc)
		rc = device_copy(device, lane_stream(lane, pending->device), &pending->copy, err);
	pending->copy.rows = pending->part.count = 0;
	return rc;
}

/* Does it go on with the chunks that are pending? They are the same extent's then. */
static bool goes_on(const struct pending *pending, const struct plan_copy *copy,
		    const unsigned char *host)
{
	const struct coding_part *part = &pending->part;
	const struct coding *coding = copy->coding;

	return part->count && part->coding == coding && part->first + part->count == copy->chunk &&
	       part->stored + (coding->offsets[copy->chunk] - coding->offsets[part->first]) == host;
}

/* One copy of the plan that is coded. */
static int add_coded(struct lane *lane, struct transit *transit, struct pending *pending,
		     const struct plan_copy *copy, const unsigned char *host,
		     struct pen_error *err)
{
	const struct plan *plan = lane->job->schedule->plan;
	int rc;

	if (goes_on(pending, copy, host)) {
		pending->part.count += copy->chunks;
		return 0;
	}
	rc = flush(lane, transit, pending, err);
	pending->device = plan->places[copy->place].device;
	pending->part = (struct coding_part){
		.coding = copy->coding,
		.first = copy->chunk,
		.count = copy->chunks,
		.stored = host,
		.memory = plan_memory(plan, copy),
	};
	return rc;
}

/* One copy of the plan, between memory and the buffer, in which its request begins at `base`. */
static int add_copy(struct lane *lane, struct transit *transit, struct pending *pending,
		    const struct plan_copy *copy, unsigned char *base, struct pen_error *err)
{
	const struct form *form = form_of(copy->form);
	const struct plan *plan = lane->job->schedule->plan;
	unsigned char *host = base + copy->at, *memory;
	int rc;

	if (copy->place == PLACE_FILL) {
		memset(host, (int)copy->offset, copy->width);
		return 0;
	}
	if (copy->coding)
		return add_coded(lane, transit, pending, copy, host, err);
	memory = plan_memory(plan, copy);
	if (pending->copy.rows == 1 && copy->rows == 1 && pending->place == copy->place &&
	    pending->copy.form == form &&
	    pending->copy.memory + form_bytes(form, pending->copy.width) == memory &&
	    pending->copy.host + pending->copy.width == host) {
		pending->copy.width += copy->width;
		return 0;
	}
	rc = flush(lane, transit, pending, err);
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
		.form = form,
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
			rc = add_copy(lane, transit, &pending,
				      &plan->copies[request->first_copy + c], base, err);
			if (rc)
				return rc;
		}
	}
	rc = flush(lane, transit, &pending, err);
	for (uint32_t left = transit->devices; left && !rc; left &= left - 1) {
		unsigned int d = (unsigned int)__builtin_ctz(left);

		rc = lane_enter(lane, d, err);
		if (!rc)
			rc = device_mark(lane->job->devices[d].device, lane_stream(lane, d),
					 &lane->fences[transit->fences][d], err);
	}
	return rc;
}

/* The words for the chunk that was the `number`-th to be decoded on the transit's GPUs. */
static int damaged(struct lane *lane, const struct transit *transit, uint64_t number,
		   struct pen_error *err)
{
	const struct plan *plan = lane->job->schedule->plan;
	const struct plan_request *request = &plan->requests[transit->range.first];
	const struct plan_copy *copy = &plan->copies[request->first_copy];

	/* The copies of neighbouring requests are neighbours. */
	for (;; copy++) {
		if (!copy->coding || plan_device(plan, copy)->is_host)
			continue;
		if (number < copy->chunks)
			break;
		number -= copy->chunks;
	}
	copy->coding->damaged(copy->coding, copy->chunk + number, err);
	return err->code;
}

int copies_check(struct lane *lane, const struct transit *transit, struct pen_error *err)
{
	for (uint32_t left = transit->devices; left; left &= left - 1) {
		unsigned int d = (unsigned int)__builtin_ctz(left);
		unsigned int verdict = device_verdict(&lane->fences[transit->fences][d]);

		if (verdict)
			return damaged(lane, transit, verdict - 1, err);
	}
	return 0;
}
