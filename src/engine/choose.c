/* SPDX-License-Identifier: MIT */
/*
 * Choosing a path for each list of a schedule, and keeping the reasons; see schedule.h. What comes
 * with a path - queue, sizes, lanes - is in the table of paths.c; here is only when it is taken.
 */
#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "engine/schedule.h"
#include "io/object.h"
#include "sys/os.h"
#include "sys/topology.h"

/* Requests are cut to this and merged upwards at run time. */
#define UNIT (512u << 10)
/* With so few cores copying is slower than the mapped path, which takes a quarter of one; below
 * this memory limit there is nothing to spare for it. */
#define SCARCE_CORES 4u
#define MAPPED_MEMORY ((uint64_t)16 << 20)
/* Extents smaller than this on average are better read together and scattered. */
#define GDS_WORTH ((uint64_t)512 << 10)
/* Jobs smaller than this are not worth setting io_uring up, and have so many lanes. */
#define URING_WORTH ((uint64_t)4 << 20)
#define SMALL_LANES 4u
/* Reading through the page cache from a disk: so many lanes that fetch, then copy, keep it busy. */
#define FETCH_LANES 4u
/* Digesting takes a tenth of what copying takes, so it takes some more lanes for the same rate. */
#define DIGEST_LANES 2u

struct chooser {
	enum pen_mode direction;
	struct pen_device *device;
	const struct pen_options *options;
	const struct coding *const *codings;	/* of the extents; or NULL */
	struct schedule *schedule;
	unsigned int cores;
	struct pen_error *err;
};

/* ------------------------------------------------------------------------------- reasons -- */

/* Note a better path that cannot be had. */
__attribute__((format(printf, 3, 4)))
static void refuse(struct schedule *schedule, enum path_id id, const char *format, ...)
{
	struct pen_path *entry = &schedule->refused[schedule->refused_count];
	va_list args;

	if (schedule->refused_count == PEN_PATHS_MAX)
		return;
	schedule->refused_count++;
	text_copy(entry->path, sizeof(entry->path), path_kinds[id].name);
	va_start(args, format);
	vsnprintf(entry->reason, sizeof(entry->reason), format, args);
	va_end(args);
}

static void refuse_error(struct schedule *schedule, enum path_id id, const struct pen_error *err)
{
	refuse(schedule, id, "%s%s%s", err->message, err->hint[0] ? ". " : "", err->hint);
}

static int cannot(struct chooser *chooser, const char *why, int nearest)
{
	int type = chooser->options->transfer;

	error_set(chooser->err, -ENOTSUP, "use transfer type", pen_transfer_name(type), -1, "%s",
		  why);
	error_hint(chooser->err, "The nearest that works here is %d %s; auto finds the best",
		   pen_transfer_number(nearest), pen_transfer_name(nearest));
	return -ENOTSUP;
}

static const char *no_direct_reason(const struct schedule *schedule)
{
	for (size_t i = 0; i < schedule->plan->object_count; i++)
		if (!schedule->plan->objects[i]->info.offset_align)
			return schedule->plan->objects[i]->info.no_direct;
	return NULL;
}

/* ------------------------------------------------------------------------- adding a path -- */

/* No more lanes than there is work for. */
static unsigned int lanes_for(const struct chooser *chooser, enum path_side side,
			      unsigned int wished, uint64_t worth)
{
	uint64_t useful = chooser->schedule->work[side].bytes / worth + 1;

	return useful < wished ? (unsigned int)useful : wished;
}

/* A path for the list of its side, with what its kind says. */
__attribute__((format(printf, 3, 4)))
static struct path *add_path(struct chooser *chooser, enum path_id id, const char *format, ...)
{
	struct schedule *schedule = chooser->schedule;
	struct path *path = &schedule->paths[schedule->path_count++];
	const struct path_kind *kind = &path_kinds[id];
	unsigned int wished = schedule->gpu ? kind->lanes : kind->lanes_host;
	va_list args;

	assert(schedule->path_count <= SIDES);
	assert(kind->transport == schedule->plan->objects[0]->ops->transport);
	*path = (struct path){
		.kind = kind,
		.side = kind->side,
		.tuned = kind->tuned,
		.size = kind->size,
		.pieces_max = kind->pieces_max,
		.pieces_first = schedule->gpu ? kind->pieces_first : 0,
		.lanes = lanes_for(chooser, kind->side, at_most(wished, chooser->cores),
				   kind->lane_worth),
	};
	va_start(args, format);
	vsnprintf(path->reason, sizeof(path->reason), format, args);
	va_end(args);
	return path;
}

static void add_direct(struct chooser *chooser, const char *why)
{
	struct schedule *schedule = chooser->schedule;
	const struct path_kind *threads = &path_kinds[PATH_DIRECT_THREADS];
	struct pen_error uring;
	struct path *path;

	if (schedule->work[AROUND].bytes <= URING_WORTH) {
		path = add_path(chooser, PATH_DIRECT_THREADS, "%s; too small a job for io_uring",
				why);
		path->lanes = lanes_for(chooser, AROUND, SMALL_LANES, threads->lane_worth);
	} else if (queue_uring_probe(&uring)) {
		refuse_error(schedule, PATH_DIRECT_URING, &uring);
		path = add_path(chooser, PATH_DIRECT_THREADS, "%s; io_uring: %s", why,
				uring.message);
		/* They wait for the store, not for a core. */
		path->lanes = lanes_for(chooser, AROUND, threads->lanes, threads->lane_worth);
	} else {
		path = add_path(chooser, PATH_DIRECT_URING, "%s", why);
		/* Only straight into host memory, where the kernel clears fresh pages, there is
		 * work for more cores. */
		if (schedule->gpu)
			path->lanes = at_most(path->lanes, chooser->cores / 4 + 1);
	}
}

static void add_cached(struct chooser *chooser, const char *why)
{
	struct schedule *schedule = chooser->schedule;
	struct path *path = add_path(chooser, PATH_CACHED, "%s", why);
	uint64_t part = schedule->work[THROUGH].bytes, all = part + schedule->work[AROUND].bytes;
	unsigned int wished = (schedule->gpu ? path->kind->lanes : path->kind->lanes_host) +
			      (chooser->options->digest_count ? DIGEST_LANES : 0);
	unsigned int most = at_most(wished, chooser->cores);

	/* Beside a cold part that takes longer anyway, no more lanes than the share deserves: they
	 * would only be in its way. */
	path->lanes = lanes_for(chooser, THROUGH, (unsigned int)((most * part + all - 1) / all),
				path->kind->lane_worth);
	/* They wait for the store, not for a core. */
	schedule->fetched = schedule->uncached && chooser->direction == PEN_READ;
	if (schedule->fetched)
		path->lanes = lanes_for(chooser, THROUGH, FETCH_LANES, path->kind->lane_worth);
}

/* ------------------------------------------------------------------------------- by auto -- */

/* Does everything that is moved lie in memory of GPUs? */
static bool only_gpus(const struct schedule *schedule)
{
	const struct plan *plan = schedule->plan;
	uint64_t bytes = plan->fill_bytes;

	for (unsigned int i = 0; i < plan->device_count; i++)
		if (plan->devices[i]->is_host)
			bytes += plan->device_bytes[i];
	return !bytes;
}

/* Is it known that a GPU starts no kernels? Before the first is wanted it is not; then a lane finds
 * out and steps down. */
static bool lacks_kernels(const struct schedule *schedule)
{
	const struct plan *plan = schedule->plan;
	bool lacks = false;

	for (unsigned int i = 0; i < plan->device_count; i++)
		lacks |= plan->device_bytes[i] && atomic_load(&plan->devices[i]->no_kernels);
	return lacks;
}

static void choose_through(struct chooser *chooser)
{
	struct schedule *schedule = chooser->schedule;
	const char *no_direct = no_direct_reason(schedule);
	const char *why = chooser->options->cache == PEN_CACHE_KEEP
				  ? "--cache keep asks for the page cache"
			  : no_direct     ? no_direct
			  : schedule->gds ? "not in the memory of a GPU, or in the page cache"
					  : "in the page cache";
	bool scarce = chooser->cores <= SCARCE_CORES &&
		      schedule->work[THROUGH].bytes >= path_kinds[PATH_MAPPED].size &&
		      chooser->options->memory_limit >= MAPPED_MEMORY;
	/* Known once the driver is up; before that a lane finds out and steps down. */
	bool unmappable = schedule->gpu && !device_poll_ready(schedule->gpu, NULL) &&
			  !schedule->gpu->maps;

	if (no_direct)
		refuse(schedule, PATH_DIRECT_URING, "%s", no_direct);
	/* No core may touch a mapping: the file may be cut short. */
	if (!schedule->gpu || chooser->direction != PEN_READ || !scarce || schedule->uncached ||
	    unmappable || !only_gpus(schedule)) {
		add_cached(chooser, why);
	} else if (chooser->options->digest_count) {
		refuse(schedule, PATH_MAPPED, "no core would see the bytes to digest them");
		add_cached(chooser, why);
	} else if (schedule->plan->formed_bytes && lacks_kernels(schedule)) {
		refuse(schedule, PATH_MAPPED,
		       "the GPU starts no kernels, and no core may look into a mapping");
		add_cached(chooser, why);
	} else {
		add_path(chooser, PATH_MAPPED,
			 "in the page cache, and cores are too few to copy it");
	}
}

/* By what the page cache holds. */
static void choose_auto(struct chooser *chooser)
{
	struct schedule *schedule = chooser->schedule;
	const struct work *around = &schedule->work[AROUND], *through = &schedule->work[THROUGH];
	bool read = chooser->direction == PEN_READ;

	if (schedule->plan->objects[0]->ops->transport == TRANSPORT_SYNTH) {
		survey_all_to(schedule, AROUND);
		add_path(chooser, PATH_SYNTHETIC, "made up in memory");
		return;
	}
	if (read)
		survey(schedule);
	if (chooser->options->cache == PEN_CACHE_KEEP || (!read && no_direct_reason(schedule))) {
		schedule->uncached |= around->count != 0;
		survey_all_to(schedule, THROUGH);
	} else if (!read) {
		survey_all_to(schedule, AROUND);
	}
	/* One lane has one queue: it takes the path of the larger part, if all can go there. */
	if (chooser->options->lanes == 1 && around->count && through->count)
		survey_all_to(schedule, through->bytes > around->bytes ||
							no_direct_reason(schedule)
						? THROUGH
						: AROUND);
	if (schedule->gds)
		survey_straight(schedule);
	if (around->count && schedule->gds)
		add_path(chooser, PATH_GDS, "storage and GPU reach each other directly")
			->transfer = PEN_GPU_DIRECT;
	else if (around->count)
		add_direct(chooser,
			   read ? "not in the page cache" : "written around the page cache");
	if (through->count)
		choose_through(chooser);
}

/* ------------------------------------------------------------------------------- by name -- */

/* cuFile reads, changes and writes back whole blocks at ragged edges. */
static bool edges_share_a_block(const struct plan *plan)
{
	for (size_t i = 1; i < plan->request_count; i++) {
		const struct plan_request *last = &plan->requests[i - 1],
					  *next = &plan->requests[i];
		uint64_t end = last->offset + last->length;

		if (last->object == next->object && next->offset % 4096 &&
		    (end - 1) / 4096 == next->offset / 4096)
			return true;
	}
	return false;
}

static bool several_gpus(const struct chooser *chooser)
{
	const struct plan *plan = chooser->schedule->plan;
	unsigned int gpus = 0;

	for (unsigned int i = 0; i < plan->device_count; i++)
		gpus += !plan->devices[i]->is_host && plan->device_bytes[i];
	return gpus > 1;
}

/* Can cuFile be had for every object? Sets `compat` where it is not the real thing. */
static int probe_cufile(struct chooser *chooser, bool *compat)
{
	const struct plan *plan = chooser->schedule->plan;
	struct pen_error why;

	for (size_t i = 0; i < plan->object_count; i++) {
		bool this_compat = false;
		int rc = object_need_name(plan->objects[i], chooser->err);

		if (rc)
			return rc;
		rc = queue_cufile_probe(plan->objects[i], chooser->schedule->gpu, &this_compat,
					&why);
		*compat |= this_compat;
		if (rc) {
			char text[sizeof(why.message) + sizeof(why.hint) + 4];

			snprintf(text, sizeof(text), "%s%s%s", why.message,
				 why.hint[0] ? ". " : "", why.hint);
			return cannot(chooser, text, PEN_CPU_ASYNC_GPU);
		}
	}
	return 0;
}

static int choose_cufile(struct chooser *chooser)
{
	struct schedule *schedule = chooser->schedule;
	int type = chooser->options->transfer, rc;
	bool compat = false, waits;

	if (chooser->options->cache == PEN_CACHE_KEEP)
		return cannot(chooser, "cuFile goes around the page cache, which is to be kept",
			      PEN_CPU_CACHED_GPU);
	if (schedule->plan->objects[0]->ops->transport != TRANSPORT_FILE)
		return cannot(chooser, "cuFile moves files, not synthetic objects",
			      PEN_CPU_ASYNC_GPU);
	if (several_gpus(chooser))
		return cannot(chooser, "cuFile moves the bytes of one GPU in one transfer",
			      PEN_CPU_ASYNC_GPU);
	rc = probe_cufile(chooser, &compat);
	if (rc)
		return rc;
	if (chooser->direction != PEN_READ && edges_share_a_block(schedule->plan))
		return cannot(chooser,
			      "extents meet inside a 4 KiB block, which cuFile would write "
			      "twice at the same time",
			      PEN_CPU_ASYNC_GPU);
	survey_all_to(schedule, AROUND);
	survey_straight(schedule);
	waits = compat && chooser->direction == PEN_READ && (type == PEN_GPU_DIRECT_ASYNC ||
							     type == PEN_GPU_BATCH_STREAM);
	if (schedule->work[AROUND].count)
		add_path(chooser, compat ? PATH_CUFILE_COMPAT : PATH_GDS, "asked for as %s%s%s",
			 pen_transfer_name(type),
			 compat ? "; cuFile runs in compatibility mode: it stages in host memory"
				: "",
			 waits ? ", and nothing tells when its reads on a stream are over, so each "
				 "is waited for" : "")
			->transfer = type;
	if (schedule->work[THROUGH].count)
		add_cached(chooser, "not in the memory of a GPU, or not as it is stored");
	return 0;
}

/* Staged in pinned memory, around the page cache where that can be. */
static void choose_staged(struct chooser *chooser, const char *why)
{
	struct schedule *schedule = chooser->schedule;
	const char *no_direct = no_direct_reason(schedule);

	if (no_direct || chooser->options->cache == PEN_CACHE_KEEP) {
		refuse(schedule, PATH_DIRECT_URING, "%s",
		       no_direct ? no_direct : "it leaves nothing in the page cache");
		survey_all_to(schedule, THROUGH);
		add_cached(chooser, why);
	} else {
		survey_all_to(schedule, AROUND);
		add_direct(chooser, why);
	}
}

static int choose_mapped(struct chooser *chooser, const char *why)
{
	struct schedule *schedule = chooser->schedule;

	if (chooser->direction != PEN_READ)
		return cannot(chooser, "it reads only", PEN_CPU_ASYNC_GPU);
	if (!schedule->plan->objects[0]->info.has_residency)
		return cannot(chooser, "the object has no page cache", PEN_CPU_ASYNC_GPU);
	if (!schedule->gpu->maps)
		return cannot(chooser, "this driver cannot register read-only memory",
			      PEN_CPU_CACHED_GPU);
	if (!only_gpus(schedule))
		return cannot(chooser, "some of the memory is the host's", PEN_CPU_CACHED_GPU);
	survey_all_to(schedule, THROUGH);
	add_path(chooser, PATH_MAPPED, "%s", why);
	return 0;
}

static int choose_asked(struct chooser *chooser)
{
	struct schedule *schedule = chooser->schedule;
	int type = chooser->options->transfer;
	char why[PEN_REASON_MAX];

	snprintf(why, sizeof(why), "asked for as %s", pen_transfer_name(type));
	if (!schedule->gpu != (type == PEN_CPU_ONLY))
		return schedule->gpu ? cannot(chooser, "the memory is a GPU's", PEN_CPU_ASYNC_GPU)
				     : cannot(chooser, "the memory is the host's, there is no GPU "
						       "in this transfer", PEN_CPU_ONLY);
	schedule->one_at_a_time = type == PEN_CPU_GPU;
	switch (type) {
	case PEN_CPU_GPU:
	case PEN_CPU_ASYNC_GPU:
	case PEN_CPU_CACHED_GPU:
	case PEN_CPU_ONLY:
		/* What is made up has one path, whatever stages it. */
		if (type == PEN_CPU_ONLY ||
		    schedule->plan->objects[0]->ops->transport == TRANSPORT_SYNTH) {
			choose_auto(chooser);
		} else if (type == PEN_CPU_CACHED_GPU) {
			survey_all_to(schedule, THROUGH);
			add_cached(chooser, why);
		} else {
			choose_staged(chooser, why);
		}
		return 0;
	case PEN_MAPPED:
		return choose_mapped(chooser, why);
	default:
		return choose_cufile(chooser);
	}
}

/* ------------------------------------------------------------------------------ the plan -- */

static size_t power_below(uint64_t value)
{
	return (size_t)1 << (63 - __builtin_clzll(value));
}

/* Most bytes of one request of the plan: larger ones are made of neighbours. */
static int choose_unit(struct chooser *chooser, const struct pen_extent *extents, size_t count)
{
	const struct pen_options *options = chooser->options;
	uint64_t unit = UNIT, most = power_below(options->memory_limit / 2), chunk = 0;
	bool capped = options->request_size != 0;

	for (size_t i = 0; i < options->digest_count; i++)
		if (options->digests[i].chunk > chunk)
			chunk = options->digests[i].chunk;
	if (options->request_size && options->request_size < unit)
		unit = options->request_size;
	for (size_t i = 0; i < count; i++) {
		const struct pen_object *object = extents[i].object;

		if (object && object->info.request_most)
			capped = true;
		if (object && object->info.request_most && object->info.request_most < unit)
			unit = power_below(object->info.request_most);
	}
	if (most < unit)
		unit = most;
	if (chunk > unit && !capped && chunk <= most)
		unit = chunk;
	/* Whatever was asked for: a coded chunk is read whole. */
	if (chooser->codings && unit < PLAN_UNIT_CODED)
		unit = PLAN_UNIT_CODED;
	chooser->schedule->unit = unit;
	if (unit > most) {
		error_set(chooser->err, -EINVAL, "keep within", "the memory limit", -1,
			  "a chunk of a coded tensor does not fit");
		error_hint(chooser->err, "Raise the memory limit to %llu KiB at least",
			   (unsigned long long)(2 * PLAN_UNIT_CODED >> 10));
		return -EINVAL;
	}
	if (chunk <= unit)
		return 0;
	error_set(chooser->err, -EINVAL, "digest", "the chunks", -1,
		  "a chunk of %llu bytes does not fit into a request of %llu",
		  (unsigned long long)chunk, (unsigned long long)unit);
	error_hint(chooser->err, "Raise the request size, or take smaller chunks");
	return -EINVAL;
}

static int make_plan(struct chooser *chooser, const struct pen_extent *extents, size_t count,
		     bool straight)
{
	const struct pen_options *options = chooser->options;
	struct plan_wishes wishes = {
		.device = chooser->device,
		.write = chooser->direction != PEN_READ,
		.allocate = options->allocate,
		.groups = options->groups,
		.straight = straight,
		/* A write has no holes to go through. */
		.gap = chooser->direction == PEN_READ ? survey_gap(options, extents, count) : 0,
		.codings = chooser->codings,
	};
	int rc = choose_unit(chooser, extents, count);

	wishes.unit = chooser->schedule->unit;
	return rc ? rc : plan_new(extents, count, &wishes, &chooser->schedule->plan, chooser->err);
}

/* Is real GPUDirect Storage to be had for all of it? If not, the reason goes into the schedule. */
static bool gds_to_be_had(struct chooser *chooser, const struct pen_extent *extents, size_t count)
{
	struct schedule *schedule = chooser->schedule;
	char reason[PEN_REASON_MAX];
	struct pen_error why;
	bool compat;

	if (!schedule->gpu || chooser->options->cache == PEN_CACHE_KEEP)
		return false;
	if (queue_cufile_evidence(reason, sizeof(reason))) {
		refuse(schedule, PATH_GDS, "%s", reason);
		return false;
	}
	if (chooser->options->digest_count) {
		refuse(schedule, PATH_GDS, "no core would see the bytes to digest them");
		return false;
	}
	for (size_t i = 0; i < count; i++) {
		struct pen_object *object = extents[i].object;

		if (extents[i].form || (chooser->codings && chooser->codings[i])) {
			refuse(schedule, PATH_GDS, "bytes are changed on their way out of staging");
			return false;
		}
		if (!object || (i && object == extents[i - 1].object))
			continue;
		if (object->ops->transport != TRANSPORT_FILE || object_need_name(object, NULL))
			return false;
		if (queue_cufile_probe(object, schedule->gpu, &compat, &why) || compat) {
			refuse_error(schedule, PATH_GDS, &why);
			return false;
		}
	}
	return true;
}

/* The plan, for real GPUDirect Storage where auto finds it and the extents suit it. */
static int plan_for(struct chooser *chooser, const struct pen_extent *extents, size_t count)
{
	struct schedule *schedule = chooser->schedule;
	int type = chooser->options->transfer, rc;
	bool cufile = type == PEN_GPU_DIRECT ||
		      (type >= PEN_GPU_DIRECT_ASYNC && type <= PEN_GPU_BATCH_STREAM);

	if (type != PEN_AUTO || !gds_to_be_had(chooser, extents, count))
		return make_plan(chooser, extents, count, cufile);
	rc = make_plan(chooser, extents, count, true);
	if (rc)
		return rc;
	schedule->gds = schedule->plan->bytes >= schedule->plan->request_count * GDS_WORTH &&
			!several_gpus(chooser) && (chooser->direction == PEN_READ ||
						   !edges_share_a_block(schedule->plan));
	if (schedule->gds)
		return 0;
	refuse(schedule, PATH_GDS, "the extents are too small or too ragged to be read one by one, "
				   "or belong to several GPUs");
	plan_free(schedule->plan);
	schedule->plan = NULL;
	return make_plan(chooser, extents, count, false);
}

/* The first GPU that bytes go to or come from. */
static struct pen_device *find_gpu(struct pen_device *device, const struct pen_extent *extents,
				   size_t count)
{
	for (size_t i = 0; i < count; i++) {
		struct pen_device *own = extents[i].device ? extents[i].device : device;

		if (extents[i].length && !(extents[i].flags & PEN_FILL) && !own->is_host)
			return own;
	}
	return NULL;
}

static int fill(struct chooser *chooser, const struct pen_extent *extents, size_t count)
{
	const struct pen_options *options = chooser->options;
	struct schedule *schedule = chooser->schedule;
	int rc;

	schedule->gpu = find_gpu(chooser->device, extents, count);
	rc = plan_for(chooser, extents, count);
	if (rc)
		return rc;
	for (int side = 0; side < SIDES; side++) {
		size_t room = schedule->plan->request_count;

		schedule->work[side].requests = os_calloc(room ? room : 1, sizeof(uint32_t));
		if (!schedule->work[side].requests)
			return error_sys(chooser->err, -ENOMEM, "plan", "the transfer", -1);
	}
	/* Types of a GPU's own need to know what it can do. */
	if (options->transfer != PEN_AUTO && options->transfer != PEN_CPU_ONLY && schedule->gpu)
		rc = pen_device_ready(schedule->gpu, chooser->err);
	if (!rc && schedule->plan->request_count) {
		if (options->transfer == PEN_AUTO)
			choose_auto(chooser);
		else
			rc = choose_asked(chooser);
	}
	return rc ? rc : fit(schedule, options, chooser->direction != PEN_READ, chooser->err);
}

int schedule_new(enum pen_mode direction, struct pen_device *device,
		 const struct pen_extent *extents, const struct coding *const *codings,
		 size_t count, const struct pen_options *options, struct schedule **schedule,
		 struct pen_error *err)
{
	struct pen_options own = *options;
	struct chooser chooser = {
		.direction = direction,
		.device = device,
		.options = &own,
		.codings = codings,
		.cores = topology_cores(),
		.err = err,
	};
	int rc;

	*schedule = NULL;
	own.memory_limit = fit_limit(options, direction != PEN_READ, extents, count);
	chooser.schedule = os_calloc(1, sizeof(*chooser.schedule));
	if (!chooser.schedule)
		return error_sys(err, -ENOMEM, "plan", "the transfer", -1);
	rc = fill(&chooser, extents, count);
	if (rc)
		schedule_free(chooser.schedule);
	else
		*schedule = chooser.schedule;
	return rc;
}

void schedule_free(struct schedule *schedule)
{
	if (!schedule)
		return;
	plan_free(schedule->plan);
	for (int side = 0; side < SIDES; side++)
		free(schedule->work[side].requests);
	free(schedule);
}
