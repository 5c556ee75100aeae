/* SPDX-License-Identifier: MIT */
/* Choosing the way of each byte, and keeping the reasons; see path.h. */
#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include "base/error.h"
#include "base/text.h"
#include "engine/path.h"
#include "mem/ring.h"
#include "sys/os.h"
#include "sys/topology.h"

/* Requests are cut to this and merged upwards at run time. */
#define UNIT (1u << 20)
/* Residency is asked for this much at a time, and finer where a part is cached. */
#define SURVEY_COARSE ((uint64_t)64 << 20)
#define SURVEY_FINE ((uint64_t)4 << 20)
/* A range with this share of its pages cached goes through the cache. */
#define HOT_SHARE 0.9
/* Holes up to this are read through: copying a hole from the cache costs less than another request,
 * while on a disk it takes the place of bytes that are wanted. */
#define GAP_HOT ((uint64_t)64 << 10)
#define GAP_COLD ((uint64_t)16 << 10)
/* The residency of about so many extents, and of so much of each plain one, decides which. */
#define GAP_SAMPLES 64u
#define GAP_SAMPLE ((uint64_t)1 << 20)
/* Lanes of each kind; more does not pay (docs/performance.md). */
#define CACHED_LANES_GPU 12u
#define CACHED_LANES_HOST 16u
#define URING_LANES 4u
#define THREAD_LANES 16u
#define CUFILE_LANES 8u
/* The mapped way registers this much at a time, on one lane: a registration has a fixed cost, and
 * the driver does one at a time, holding up everybody's copies. So it is not mixed with others. */
#define MAPPED_SIZE (64u << 20)
/* Below this limit there is no memory to spare for it. */
#define MAPPED_MEMORY ((uint64_t)16 << 20)
#define CACHED_SIZE (4u << 20)
/* With so few cores copying is slower than the mapped way, which takes a quarter of one. */
#define SCARCE_CORES 4u
#define CUFILE_SIZE (16u << 20)
/* Extents smaller than this on average are better read together and scattered. */
#define GDS_WORTH ((uint64_t)512 << 10)
/* Jobs smaller than this are not worth a ring of their own. */
#define URING_WORTH ((uint64_t)4 << 20)

struct chooser {
	enum pen_mode direction;
	struct pen_device *device;
	const struct pen_options *options;
	struct path *path;
	unsigned int cores;
	struct pen_error *err;
};

static const char *const transfer_names[] = {
	"AUTO", "GPU_DIRECT", "CPU_ONLY", "CPU_GPU", "CPU_ASYNC_GPU", "CPU_CACHED_GPU",
	"GPU_DIRECT_ASYNC", "GPU_BATCH", "GPU_BATCH_STREAM", "MAPPED",
};
#define TRANSFERS ((int)(sizeof(transfer_names) / sizeof(transfer_names[0])))

const char *pen_transfer_name(int type)
{
	return type >= 0 && type < TRANSFERS ? transfer_names[type] : NULL;
}

int pen_transfer_number(int type)
{
	return type >= PEN_GPU_DIRECT && type <= PEN_GPU_BATCH_STREAM ? type - PEN_GPU_DIRECT : -1;
}

int pen_transfer_parse(const char *text, int *type, struct pen_error *err)
{
	uint64_t number;

	error_clear(err);
	if (!text_to_number(text, PEN_GPU_BATCH_STREAM - PEN_GPU_DIRECT, &number)) {
		*type = (int)number + PEN_GPU_DIRECT;
		return 0;
	}
	for (int i = 0; i < TRANSFERS; i++)
		if (!strcasecmp(text, transfer_names[i])) {
			*type = i;
			return 0;
		}
	error_set(err, -EINVAL, "use transfer type", text, -1, "there is no such type");
	error_hint(err,
		   "Types are auto, 0 GPU_DIRECT, 1 CPU_ONLY, 2 CPU_GPU, 3 CPU_ASYNC_GPU, "
		   "4 CPU_CACHED_GPU, 5 GPU_DIRECT_ASYNC, 6 GPU_BATCH, 7 GPU_BATCH_STREAM, MAPPED");
	return -EINVAL;
}

int path_options(const struct pen_options *given, struct pen_options *full, struct pen_error *err)
{
	static const struct pen_options defaults = PEN_OPTIONS_INIT;
	const char *object = "the options";

	*full = defaults;
	if (given) {
		/* A caller compiled against an older header has a shorter struct. */
		size_t size = given->size < sizeof(*full) ? given->size : sizeof(*full);

		if (size < offsetof(struct pen_options, memory_limit))
			return error_set(err, -EINVAL, "use", object, -1, "their size is not set");
		memcpy(full, given, size);
		full->size = sizeof(*full);
	}
	if (!pen_transfer_name(full->transfer))
		return error_set(err, -EINVAL, "use", object, -1, "%d is no transfer type",
				 full->transfer);
	if (full->cache < PEN_CACHE_AUTO || full->cache > PEN_CACHE_DROP)
		return error_set(err, -EINVAL, "use", object, -1, "%d is no cache policy",
				 full->cache);
	if (!full->memory_limit)
		full->memory_limit = MEMORY_LIMIT_DEFAULT;
	if (full->memory_limit < MEMORY_LIMIT_MIN) {
		error_set(err, -EINVAL, "keep within", "the memory limit", -1,
			  "%llu bytes are too few to stage a transfer",
			  (unsigned long long)full->memory_limit);
		error_hint(err, "Allow at least %llu KiB",
			   (unsigned long long)MEMORY_LIMIT_MIN >> 10);
		return -EINVAL;
	}
	if (full->request_size && (full->request_size < 4096 || full->request_size > (1u << 30) ||
				   (full->request_size & (full->request_size - 1)))) {
		error_set(err, -EINVAL, "use", "the request size", -1, "%llu is out of range",
			  (unsigned long long)full->request_size);
		error_hint(err, "Take a power of two from 4K to 1G");
		return -EINVAL;
	}
	if (full->request_size > full->memory_limit) {
		error_set(err, -EINVAL, "keep within", "the memory limit", -1,
			  "a request of %llu bytes does not fit into %llu",
			  (unsigned long long)full->request_size,
			  (unsigned long long)full->memory_limit);
		error_hint(err, "Raise the memory limit or lower the request size");
		return -EINVAL;
	}
	if (full->lanes > LANES_MAX)
		return error_set(err, -EINVAL, "use", object, -1, "%u lanes are more than %u",
				 full->lanes, LANES_MAX);
	if (full->allocate && !full->allocated)
		return error_set(err, -EINVAL, "use", object, -1,
				 "there is no place for the memory to allocate");
	return full->inject ? queue_inject_check(full->inject, err) : 0;
}

/* Note a better way that cannot be had. */
__attribute__((format(printf, 3, 4)))
static void refuse(struct path *path, const char *name, const char *format, ...)
{
	struct pen_path *entry = &path->refused[path->refused_count];
	va_list args;

	if (path->refused_count == PEN_PATHS_MAX)
		return;
	path->refused_count++;
	text_copy(entry->path, sizeof(entry->path), name);
	va_start(args, format);
	vsnprintf(entry->reason, sizeof(entry->reason), format, args);
	va_end(args);
}

static void refuse_error(struct path *path, const char *name, const struct pen_error *err)
{
	refuse(path, name, "%s%s%s", err->message, err->hint[0] ? ". " : "", err->hint);
}

__attribute__((format(printf, 4, 5)))
static struct way *add_way(struct path *path, const char *name, const struct queue_ops *queue,
			   const char *format, ...)
{
	struct way *way = &path->ways[path->way_count++];
	va_list args;

	assert(path->way_count <= LISTS);
	memset(way, 0, sizeof(*way));
	text_copy(way->name, sizeof(way->name), name);
	way->queue = queue;
	va_start(args, format);
	vsnprintf(way->reason, sizeof(way->reason), format, args);
	va_end(args);
	return way;
}

/* ------------------------------------------------------------------------ the two lists -- */

static void put(struct path *path, enum path_list list, uint32_t request)
{
	struct work *work = &path->work[list];

	work->requests[work->count++] = request;
	work->bytes += path->plan->requests[request].length;
}

static bool is_hot(struct pen_object *object, uint64_t offset, uint64_t length)
{
	uint64_t resident;

	/* Where residency cannot be asked, direct reads are right for cold and for hot bytes. */
	if (object_residency(object, offset, length, &resident, NULL))
		return false;
	return (double)resident >= HOT_SHARE * (double)length;
}

/* All or nothing of a stretch, or -1 for mixed. */
static int uniform(struct pen_object *object, uint64_t offset, uint64_t length)
{
	uint64_t resident;

	if (object_residency(object, offset, length, &resident, NULL) || !resident)
		return COLD;
	return resident == length ? HOT : -1;
}

/* Survey the requests [first, last) of one object that fall into one coarse stretch. */
static void survey_stretch(struct path *path, size_t first, size_t last)
{
	struct plan_request *requests = path->plan->requests;
	struct pen_object *object = path->plan->objects[requests[first].object];
	uint64_t start = requests[first].offset;
	uint64_t end = requests[last - 1].offset + requests[last - 1].length;
	int list = uniform(object, start, end - start);

	/* What cannot go direct goes through the page cache, there or not. */
	if (!object->info.offset_align) {
		path->hot_is_cold |= list != HOT;
		list = HOT;
	}
	while (first < last) {
		size_t stop = first + 1;
		int fine = list;

		if (list < 0) {
			uint64_t window = requests[first].offset / SURVEY_FINE;

			while (stop < last && requests[stop].offset / SURVEY_FINE == window)
				stop++;
			fine = is_hot(object, requests[first].offset,
				      requests[stop - 1].offset + requests[stop - 1].length -
					      requests[first].offset)
				       ? HOT
				       : COLD;
		}
		for (; first < stop; first++)
			put(path, (enum path_list)fine, (uint32_t)first);
	}
}

/* Split the plan by what the page cache holds. */
static void survey(struct path *path)
{
	struct plan *plan = path->plan;
	size_t first = 0;

	while (first < plan->request_count) {
		const struct plan_request *head = &plan->requests[first];
		size_t last = first + 1;

		while (last < plan->request_count && plan->requests[last].object == head->object &&
		       plan->requests[last].offset / SURVEY_COARSE == head->offset / SURVEY_COARSE)
			last++;
		survey_stretch(path, first, last);
		first = last;
	}
}

/* One list for everything, whatever was put where before. */
static void all_to(struct path *path, enum path_list list)
{
	for (int i = 0; i < LISTS; i++)
		path->work[i].count = path->work[i].bytes = 0;
	for (size_t i = 0; i < path->plan->request_count; i++)
		put(path, list, (uint32_t)i);
}

/* ----------------------------------------------------------------------------- the ways -- */

static unsigned int at_most(unsigned int value, unsigned int limit)
{
	return value < limit ? value : limit;
}

/* No more lanes than there is work for. */
static unsigned int lanes_for(const struct chooser *chooser, enum path_list list,
			      unsigned int wished, uint64_t worth)
{
	uint64_t useful = chooser->path->work[list].bytes / worth + 1;

	return useful < wished ? (unsigned int)useful : wished;
}

static void add_direct(struct chooser *chooser, const char *why)
{
	struct path *path = chooser->path;
	struct pen_error uring;
	struct way *way;

	if (path->work[COLD].bytes <= URING_WORTH) {
		way = add_way(path, "direct-threads", &queue_sync_ops,
			      "%s; too small a job for a ring", why);
		way->lanes = lanes_for(chooser, COLD, 4, UNIT);
	} else if (queue_uring_probe(&uring)) {
		refuse_error(path, "direct-uring", &uring);
		way = add_way(path, "direct-threads", &queue_sync_ops, "%s; io_uring: %s", why,
			      uring.message);
		way->lanes = lanes_for(chooser, COLD, THREAD_LANES, UNIT);
	} else {
		way = add_way(path, "direct-uring", &queue_uring_ops, "%s", why);
		/* Straight into host memory the kernel clears fresh pages: work for more cores. */
		way->lanes = lanes_for(chooser, COLD,
				       at_most(URING_LANES, chooser->device->is_host
								    ? chooser->cores
								    : chooser->cores / 4 + 1),
				       8 * UNIT);
	}
	way->list = COLD;
	way->direct = true;
	way->tuned = true;
}

static unsigned int share_of(unsigned int lanes, uint64_t part, uint64_t all)
{
	return (unsigned int)((lanes * part + all - 1) / all);
}

static void add_cached(struct chooser *chooser, enum path_list list, const char *why)
{
	bool host = chooser->device->is_host;
	struct way *way = add_way(chooser->path, "cached", &queue_sync_ops, "%s", why);
	unsigned int wished = at_most(host ? CACHED_LANES_HOST : CACHED_LANES_GPU, chooser->cores);

	uint64_t all = chooser->path->work[COLD].bytes + chooser->path->work[HOT].bytes;

	/* Beside a cold part that takes longer anyway, no more lanes than the share deserves: they
	 * would only be in its way. */
	wished = share_of(wished, chooser->path->work[list].bytes, all);
	way->list = list;
	way->size = CACHED_SIZE;
	way->lanes = lanes_for(chooser, list, wished, 2 * UNIT);
	/* One to be filled while another is copied from. */
	way->pieces_max = 2;
	way->pieces_first = host ? 0 : 2;
}

static void add_mapped(struct chooser *chooser, const char *why)
{
	struct way *way = add_way(chooser->path, "mapped", &queue_map_ops, "%s", why);

	way->list = HOT;
	way->size = MAPPED_SIZE;
	way->lanes = 1;
}

static void add_cufile(struct chooser *chooser, int transfer, const char *name, const char *why)
{
	struct way *way = add_way(chooser->path, name, &queue_cufile_ops, "%s", why);

	way->list = COLD;
	way->transfer = transfer;
	way->size = CUFILE_SIZE;
	way->lanes = lanes_for(chooser, COLD, at_most(CUFILE_LANES, chooser->cores), CUFILE_SIZE);
}

static const char *no_direct_reason(const struct path *path)
{
	for (size_t i = 0; i < path->plan->object_count; i++)
		if (!path->plan->objects[i]->info.offset_align)
			return path->plan->objects[i]->info.no_direct;
	return NULL;
}

static void choose_hot(struct chooser *chooser)
{
	struct path *path = chooser->path;
	const char *no_direct = no_direct_reason(path);
	const char *why = chooser->options->cache == PEN_CACHE_KEEP
				  ? "--cache keep asks for the page cache"
			  : no_direct ? no_direct
				      : "in the page cache";
	bool scarce = chooser->cores <= SCARCE_CORES && path->work[HOT].bytes >= MAPPED_SIZE &&
		      chooser->options->memory_limit >= MAPPED_MEMORY;
	/* Known once the driver is up; before that a lane finds out and steps down. */
	bool unmappable = !device_poll_ready(chooser->device, NULL) && !chooser->device->maps;

	if (no_direct)
		refuse(path, "direct-uring", "%s", no_direct);
	if (!chooser->device->is_host && chooser->direction == PEN_READ && scarce &&
	    !path->hot_is_cold && !unmappable)
		add_mapped(chooser, "in the page cache, and cores are too few to copy it");
	else
		add_cached(chooser, HOT, why);
}

/* Into memory of the host, or staged for a GPU, by residency. */
static void choose_auto(struct chooser *chooser)
{
	struct path *path = chooser->path;
	bool read = chooser->direction == PEN_READ;
	if (path->plan->objects[0]->ops->transport == TRANSPORT_SYNTH) {
		struct way *way;

		all_to(path, COLD);
		way = add_way(path, "synthetic", &queue_synth_ops, "made up in memory");
		way->list = COLD;
		way->tuned = true;
		way->lanes = lanes_for(chooser, COLD, at_most(URING_LANES, chooser->cores), UNIT);
		return;
	}
	if (read)
		survey(path);
	if (chooser->options->cache == PEN_CACHE_KEEP || (!read && no_direct_reason(path))) {
		path->hot_is_cold |= path->work[COLD].count != 0;
		all_to(path, HOT);
	} else if (!read) {
		all_to(path, COLD);
	}
	/* One lane has one queue: it takes the way of the larger part, if all can go that way. */
	if (chooser->options->lanes == 1 && path->work[COLD].count && path->work[HOT].count)
		all_to(path, path->work[HOT].bytes > path->work[COLD].bytes ||
					     no_direct_reason(path)
				     ? HOT
				     : COLD);
	if (path->work[COLD].count && path->gds)
		add_cufile(chooser, PEN_GPU_DIRECT, "gds",
			   "storage and GPU reach each other directly");
	else if (path->work[COLD].count)
		add_direct(chooser,
			   read ? "not in the page cache" : "written around the page cache");
	if (path->work[HOT].count)
		choose_hot(chooser);
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

/* cuFile reads, changes and writes back whole blocks at ragged edges. */
static bool edges_share_a_block(const struct plan *plan)
{
	for (size_t i = 1; i < plan->request_count; i++) {
		const struct plan_request *last = &plan->requests[i - 1],
					  *next = &plan->requests[i];

		if (last->edge && next->edge && last->object == next->object &&
		    (last->offset + last->length - 1) / 4096 == next->offset / 4096)
			return true;
	}
	return false;
}

static int choose_cufile(struct chooser *chooser)
{
	struct path *path = chooser->path;
	char reason[PEN_REASON_MAX];
	struct pen_error why;
	bool compat = false, waits;
	int type = chooser->options->transfer, rc;

	if (chooser->options->cache == PEN_CACHE_KEEP)
		return cannot(chooser, "cuFile goes around the page cache, which is to be kept",
			      PEN_CPU_CACHED_GPU);
	for (size_t i = 0; i < path->plan->object_count; i++) {
		if (path->plan->objects[i]->ops->transport != TRANSPORT_FILE)
			return cannot(chooser, "cuFile moves files, not synthetic objects",
				      PEN_CPU_ASYNC_GPU);
		bool this_compat = false;

		rc = object_need_name(path->plan->objects[i], chooser->err);
		if (rc)
			return rc;
		rc = queue_cufile_probe(path->plan->objects[i], chooser->device, &this_compat,
					&why);
		compat |= this_compat;
		if (rc) {
			char text[sizeof(why.message) + sizeof(why.hint) + 4];

			snprintf(text, sizeof(text), "%s%s%s", why.message,
				 why.hint[0] ? ". " : "", why.hint);
			return cannot(chooser, text, PEN_CPU_ASYNC_GPU);
		}
	}
	if (edges_share_a_block(path->plan))
		return cannot(chooser,
			      "extents meet inside a 4 KiB block, which cuFile would write "
			      "twice at the same time",
			      PEN_CPU_ASYNC_GPU);
	all_to(path, COLD);
	waits = compat && chooser->direction == PEN_READ && (type == PEN_GPU_DIRECT_ASYNC ||
							     type == PEN_GPU_BATCH_STREAM);
	snprintf(reason, sizeof(reason), "asked for as %s%s%s", pen_transfer_name(type),
		 compat ? "; cuFile runs in compatibility mode: it stages in host memory" : "",
		 waits ? ", and nothing tells when its reads on a stream are over, so each is "
			 "waited for" : "");
	add_cufile(chooser, type, compat ? "cufile-compat" : "gds", reason);
	return 0;
}

static int choose_asked(struct chooser *chooser)
{
	struct path *path = chooser->path;
	int type = chooser->options->transfer;
	bool host = chooser->device->is_host;
	char why[PEN_REASON_MAX];

	snprintf(why, sizeof(why), "asked for as %s", pen_transfer_name(type));
	if (host != (type == PEN_CPU_ONLY))
		return host ? cannot(chooser, "the memory is the host's, there is no GPU in this "
					      "transfer", PEN_CPU_ONLY)
			    : cannot(chooser, "the memory is a GPU's", PEN_CPU_ASYNC_GPU);
	if (path->plan->objects[0]->ops->transport == TRANSPORT_SYNTH && type != PEN_GPU_DIRECT &&
	    type < PEN_GPU_DIRECT_ASYNC) {
		path->one_at_a_time = type == PEN_CPU_GPU;
		choose_auto(chooser);
		return 0;
	}
	switch (type) {
	case PEN_CPU_ONLY:
		choose_auto(chooser);
		return 0;
	case PEN_CPU_GPU:
	case PEN_CPU_ASYNC_GPU:
		path->one_at_a_time = type == PEN_CPU_GPU;
		if (no_direct_reason(path) || chooser->options->cache == PEN_CACHE_KEEP) {
			refuse(path, "direct-uring", "%s",
			       no_direct_reason(path) ? no_direct_reason(path)
						      : "it leaves nothing in the page cache");
			all_to(path, HOT);
			add_cached(chooser, HOT, why);
		} else {
			all_to(path, COLD);
			add_direct(chooser, why);
		}
		return 0;
	case PEN_CPU_CACHED_GPU:
		all_to(path, HOT);
		add_cached(chooser, HOT, why);
		return 0;
	case PEN_MAPPED:
		if (chooser->direction != PEN_READ)
			return cannot(chooser, "it reads only", PEN_CPU_ASYNC_GPU);
		if (!path->plan->objects[0]->info.has_residency)
			return cannot(chooser, "the object has no page cache", PEN_CPU_ASYNC_GPU);
		if (!chooser->device->maps)
			return cannot(chooser, "this driver cannot register read-only memory",
				      PEN_CPU_CACHED_GPU);
		all_to(path, HOT);
		add_mapped(chooser, why);
		return 0;
	default:
		return choose_cufile(chooser);
	}
}

/* ------------------------------------------------------------------- memory and threads -- */

static size_t power_below(uint64_t value)
{
	return (size_t)1 << (63 - __builtin_clzll(value));
}

/* Most bytes of page cache a mapped way pins: two requests a lane. */
static uint64_t mapped_most(const struct way *way)
{
	return (uint64_t)way->size * 2 * way->lanes;
}

/* Share the lanes that were asked for out over the ways; each way has at least one. */
static void share_lanes(struct path *path, unsigned int lanes)
{
	unsigned int left = lanes;

	for (unsigned int i = 0; lanes && i < path->way_count; i++) {
		struct way *way = &path->ways[i];
		unsigned int after = path->way_count - i - 1;
		unsigned int most = left > after ? left - after : 1;

		/* The last way takes all that is left. */
		way->lanes = after ? at_most(way->lanes, most) : most;
		left -= at_most(way->lanes, left);
	}
}

unsigned int path_pieces_kept(const struct path *path, const struct way *way)
{
	if (way->queue->lends || (way->queue->placed && !path->gds))
		return 0;
	return way->lanes * (way->pieces_first ? way->pieces_first : 1);
}

static unsigned int all_pieces_kept(const struct path *path)
{
	unsigned int kept = 0;

	for (unsigned int i = 0; i < path->way_count; i++)
		kept += path_pieces_kept(path, &path->ways[i]);
	return kept;
}

/* How many pieces lanes take before their first request: as many as each of them will use, and all
 * lanes at once may have. Otherwise they take them one by one, as they find work. */
static void fit_first_pieces(struct path *path, unsigned int most)
{
	for (unsigned int i = 0; i < path->way_count; i++) {
		struct way *way = &path->ways[i];
		uint64_t share = path->work[way->list].bytes / (way->lanes ? way->lanes : 1);

		/* Two requests may fit into one piece, and a short job has no second round. */
		if (way->pieces_first && (path->one_at_a_time || share < 2 * way->size ||
					  2 * way->size <= path->piece_size))
			way->pieces_first = share < path->unit ? 0 : 1;
	}
	for (unsigned int first = 2; first-- && all_pieces_kept(path) > most;)
		for (unsigned int i = 0; i < path->way_count; i++)
			path->ways[i].pieces_first = at_most(path->ways[i].pieces_first, first);
}

/*
 * Fit the ways into the memory promise. The mapped way pins page cache; its share comes off first.
 * The rest is cut into pieces such that each lane that stages has at least one.
 */
static void fit(struct path *path, const struct pen_options *options)
{
	uint64_t limit = options->memory_limit, share = path->way_count > 1 ? limit / 2 : limit;
	size_t piece = options->request_size > PIECE_SIZE ? options->request_size : PIECE_SIZE;
	unsigned int staging = 0, most;

	for (unsigned int i = 0; i < path->way_count; i++) {
		struct way *way = &path->ways[i];

		if (options->request_size)
			way->size = (uint32_t)options->request_size;
		if (!way->queue->lends && !way->queue->placed)
			staging += way->lanes;
		if (!way->queue->lends)
			continue;
		while (way->size > path->unit && mapped_most(way) > share)
			way->size /= 2;
		while (way->lanes > 1 && mapped_most(way) > share)
			way->lanes--;
		limit -= mapped_most(way) < limit ? mapped_most(way) : limit;
		/* A lane that steps down gives this share back to the ring, in pieces. */
		while (piece > 2 * way->size)
			piece /= 2;
	}
	while (piece > path->unit && piece > options->request_size && staging * piece > limit)
		piece /= 2;
	most = (unsigned int)(limit / piece);
	for (unsigned int i = 0; i < path->way_count; i++) {
		struct way *way = &path->ways[i];

		if (way->queue->lends || way->queue->placed)
			continue;
		/* Fewer lanes rather than more memory. */
		if (staging > most)
			way->lanes = way->lanes * most / staging ? way->lanes * most / staging : 1;
		if (!way->size || way->size > piece)
			way->size = (uint32_t)piece;
		if (!way->pieces_max)
			way->pieces_max = most;
	}
	path->memory_limit = limit;
	path->piece_size = piece;
	fit_first_pieces(path, most);
}

/* A block of the store must fit into a request. */
static int check_blocks(struct chooser *chooser)
{
	const struct plan *plan = chooser->path->plan;

	for (size_t i = 0; i < plan->object_count; i++) {
		uint32_t align = plan->objects[i]->info.offset_align;

		if (!chooser->path->work[COLD].count || align <= chooser->path->unit)
			continue;
		error_set(chooser->err, -EINVAL, "keep within", "the memory limit", -1,
			  "the store wants blocks of %u bytes, requests are of %llu", align,
			  (unsigned long long)chooser->path->unit);
		error_hint(chooser->err, "Raise the memory limit or the request size");
		return -EINVAL;
	}
	return 0;
}

/* The bytes of an extent that are looked at. What is out of bounds is refused later, in words, and
 * not looked at. */
static uint64_t gap_sample(const struct pen_extent *extent)
{
	uint64_t length, end;

	if (extent->rows < 2)
		length = extent->length < GAP_SAMPLE ? extent->length : GAP_SAMPLE;
	else if (__builtin_mul_overflow(extent->rows - 1, extent->object_pitch, &length))
		return 0;
	if (__builtin_add_overflow(extent->offset, length, &end) ||
	    end > extent->object->info.size)
		return 0;
	return length;
}

/* How large a hole may be to be read through. */
static uint64_t choose_gap(const struct pen_options *options, const struct pen_extent *extents,
			   size_t count)
{
	size_t step = (count + GAP_SAMPLES - 1) / GAP_SAMPLES;
	uint64_t total = 0, cached = 0, resident;

	if (options->gap)
		return options->gap == UINT64_MAX ? 0 : options->gap;
	for (size_t i = 0; i < count; i += step) {
		const struct pen_extent *extent = &extents[i];
		uint64_t length;

		if (!extent->object || !extent->object->info.has_residency)
			continue;
		length = gap_sample(extent);
		if (!length)
			continue;
		total += length;
		if (!object_residency(extent->object, extent->offset, length, &resident, NULL))
			cached += resident;
	}
	return cached * 2 < total ? GAP_COLD : GAP_HOT;
}

static int make_plan(struct chooser *chooser, const struct pen_extent *extents, size_t count,
		     bool placed)
{
	const struct pen_options *options = chooser->options;
	struct plan_wishes wishes = {
		.write = chooser->direction != PEN_READ,
		.relative = options->allocate != 0,
		.relative_size = options->allocate,
		.groups = options->groups,
		.placed = placed,
		.unit = UNIT,
		/* A write has no holes to go through. */
		.gap = chooser->direction == PEN_READ ? choose_gap(options, extents, count) : 0,
		.one_memory = chooser->device->is_host || options->allocate,
	};
	uint64_t most = power_below(options->memory_limit / 2);

	if (options->request_size && options->request_size < wishes.unit)
		wishes.unit = options->request_size;
	if (most < wishes.unit)
		wishes.unit = most;
	chooser->path->unit = wishes.unit;
	return plan_new(extents, count, &wishes, &chooser->path->plan, chooser->err);
}

/* Is real GPUDirect Storage to be had for all of it? If not, the reason goes into the path. */
static bool gds_to_be_had(struct chooser *chooser, const struct pen_extent *extents, size_t count)
{
	struct path *path = chooser->path;
	char reason[PEN_REASON_MAX];
	struct pen_error why;
	bool compat;

	if (chooser->device->is_host || chooser->options->cache == PEN_CACHE_KEEP)
		return false;
	if (queue_cufile_evidence(reason, sizeof(reason))) {
		refuse(path, "gds", "%s", reason);
		return false;
	}
	for (size_t i = 0; i < count; i++) {
		struct pen_object *object = extents[i].object;

		if (!object || (i && object == extents[i - 1].object))
			continue;
		if (object->ops->transport != TRANSPORT_FILE || object_need_name(object, NULL))
			return false;
		if (queue_cufile_probe(object, chooser->device, &compat, &why) || compat) {
			refuse_error(path, "gds", &why);
			return false;
		}
	}
	return true;
}

/* The plan, for real GPUDirect Storage where auto finds it and the extents suit it. */
static int plan_for(struct chooser *chooser, const struct pen_extent *extents, size_t count)
{
	struct path *path = chooser->path;
	int type = chooser->options->transfer, rc;
	bool cufile = type == PEN_GPU_DIRECT ||
		      (type >= PEN_GPU_DIRECT_ASYNC && type <= PEN_GPU_BATCH_STREAM);

	if (type != PEN_AUTO || !gds_to_be_had(chooser, extents, count))
		return make_plan(chooser, extents, count, cufile);
	rc = make_plan(chooser, extents, count, true);
	if (rc)
		return rc;
	path->gds = path->plan->bytes >= path->plan->request_count * GDS_WORTH &&
		    !edges_share_a_block(path->plan);
	if (path->gds)
		return 0;
	refuse(path, "gds", "the extents are too small or too ragged to be read one by one");
	plan_free(path->plan);
	path->plan = NULL;
	return make_plan(chooser, extents, count, false);
}

int path_choose(enum pen_mode direction, struct pen_device *device,
		const struct pen_extent *extents, size_t count, const struct pen_options *options,
		struct path **path, struct pen_error *err)
{
	struct chooser chooser = {
		.direction = direction,
		.device = device,
		.options = options,
		.cores = topology_cores(),
		.err = err,
	};
	int rc;

	*path = NULL;
	chooser.path = os_calloc(1, sizeof(*chooser.path));
	if (!chooser.path)
		return error_sys(err, -ENOMEM, "plan", "the transfer", -1);
	rc = plan_for(&chooser, extents, count);
	if (rc)
		goto out;
	for (int list = 0; list < LISTS; list++) {
		size_t room = chooser.path->plan->request_count;

		chooser.path->work[list].requests = os_calloc(room ? room : 1, sizeof(uint32_t));
		if (!chooser.path->work[list].requests) {
			rc = error_sys(err, -ENOMEM, "plan", "the transfer", -1);
			goto out;
		}
	}
	/* Types of a GPU's own need to know what it can do. */
	if (options->transfer != PEN_AUTO && options->transfer != PEN_CPU_ONLY)
		rc = pen_device_ready(device, err);
	if (!rc && chooser.path->plan->request_count) {
		if (options->transfer == PEN_AUTO)
			choose_auto(&chooser);
		else
			rc = choose_asked(&chooser);
	}
	if (!rc) {
		share_lanes(chooser.path, options->lanes);
		fit(chooser.path, options);
		rc = check_blocks(&chooser);
	}
out:
	if (rc) {
		path_free(chooser.path);
		return rc;
	}
	*path = chooser.path;
	return 0;
}

void path_free(struct path *path)
{
	if (!path)
		return;
	plan_free(path->plan);
	for (int list = 0; list < LISTS; list++)
		free(path->work[list].requests);
	free(path);
}
