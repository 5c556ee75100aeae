/* SPDX-License-Identifier: MIT */
/*
 * Packing and unpacking: one file becomes another, piece by piece, on all cores. A piece is some
 * chunks of a tensor, or bytes that stay as they are; it is read, coded or decoded, and written by
 * one thread. How long a packed piece gets is known when it is coded, so pieces take their places
 * in the order of their numbers:
 *
 *   pack     read original -> code -> wait for its turn, take a place -> write
 *   unpack   read coded -> decode -> write where it was, or nowhere: then it was checked
 *
 * To verify is to unpack what was packed to nowhere, from its header on, as any reader would.
 *
 * Invariants
 *   1. Room for the header and the table of chunks is left at the front, as much as they can need
 *      at most; they are written last.
 *   2. Each thread has memory for one piece, once as it was and once as it is stored; there are no
 *      more threads than the limit has room for.
 *   3. The first error counts. After it no thread takes a further piece or waits for a turn.
 *   4. Objects are the caller's, who commits them: what fails here leaves the target as it was.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "base/digest.h"
#include "base/error.h"
#include "base/planes.h"
#include "format/coded.h"
#include "format/model.h"
#include "format/pack.h"
#include "format/safetensors_write.h"
#include "format/words.h"
#include "io/object.h"
#include "sys/os.h"
#include "sys/topology.h"

#define PIECE ((uint64_t)1 << 20)	/* original bytes of a piece; a multiple of every chunk */
#define MEMORY_LIMIT ((uint64_t)128 << 20)
#define THREAD_MEMORY (2 * (PIECE + (uint64_t)PLANES_ALIGN))
#define THREADS_MAX 64u
#define PREFIX 8u			/* bytes that say how long a header is */

_Static_assert(PEN_DTYPES <= PEN_PACKED_KINDS, "each has its numbers in struct pen_packed");

struct piece {
	size_t tensor;			/* whose bytes they are; of a plain copy 0 */
	uint64_t original, bytes;	/* in the original file */
	uint64_t place, stored;		/* in the coded one */
	uint64_t chunk;			/* the first, in the table of chunks ... */
	uint64_t number;		/* ... and in its tensor */
	uint32_t chunk_count;		/* 0: the bytes stay as they are */
	uint32_t crc32;			/* of the original bytes */
};

struct worker {
	struct pen_pack *pack;
	pthread_t thread;
	unsigned char *original, *stored;	/* bytes of a piece */
};

/* What is done with a piece. */
typedef int step(struct worker *worker, struct piece *piece, struct pen_error *err);

struct pen_pack {
	enum pack_direction direction;
	struct pen_pack_options options;
	struct pen_model *model;	/* whose file it is; NULL: the caller's affair */
	struct pack_file *files;
	size_t file_count;
	struct pen_packed packed;	/* what has become of them */
	unsigned int generation;	/* os_generation() of the process that started it */

	/* Of the file that it is at: */
	const struct pack_file *file;
	const struct safetensors *table;	/* its own */
	bool is_coded;			/* it was coded, or is from now on */
	uint32_t crc32;			/* of the original file, when all pieces were seen */
	/* Tensors in the order of `table`; of those that are packed: */
	enum planes_kind *kinds;
	uint64_t *stored;		/* bytes that each has in the coded file */
	char *header;			/* of the original file, with its length before it */
	uint64_t header_size;
	struct coded_chunks chunks;
	uint64_t chunk_count;
	uint64_t room;			/* for the header of the coded file */

	struct piece *pieces;
	size_t piece_count;
	step *step;
	struct worker workers[THREADS_MAX];
	unsigned int worker_count;
	pthread_t thread;		/* that sees to it all */
	uint64_t started;		/* ns */
	_Atomic uint64_t done, total;	/* bytes; neither ever gets smaller */
	atomic_bool cancelled;
	atomic_int state;		/* enum pen_state */

	pthread_mutex_t lock;		/* of all below */
	pthread_cond_t changed;
	size_t next;			/* piece that nobody has taken */
	size_t turn;			/* piece that may take its place, which is ... */
	uint64_t place;
	int rc;				/* the first error */
	struct pen_error err;
};

/* ----------------------------------------------------------------------------- small things -- */

static int no_memory(const struct pen_pack *pack, struct pen_error *err)
{
	return error_sys(err, -ENOMEM, pack->file->doing, pack->file->name, -1);
}

static int read_all(const struct pack_file *file, void *buffer, uint64_t length, uint64_t offset,
		    struct pen_error *err)
{
	return file->read(file->source, buffer, length, offset, err);
}

static int write_all(struct pen_object *object, const void *bytes, uint64_t length,
		     uint64_t offset, struct pen_error *err)
{
	uint64_t done = 0;

	while (object && done < length) {
		ssize_t n = os_pwrite(object->fd, (const char *)bytes + done,
				      (size_t)(length - done), offset + done);

		if (n == -EINTR)
			continue;
		if (n <= 0) {
			int rc = n ? (int)n : -EIO;

			error_sys(err, rc, "write", object->name, (int64_t)(offset + done));
			if (rc == -ENOSPC || rc == -EDQUOT)
				error_hint(err, "Make room, or write elsewhere; nothing was left");
			return rc;
		}
		done += (uint64_t)n;
	}
	return 0;
}

static uint32_t crc32_of(const void *bytes, uint64_t length)
{
	return (uint32_t)digest_kind(PEN_DIGEST_CRC32)->of(bytes, (size_t)length);
}

static bool failed(struct pen_pack *pack)
{
	return pack->rc || atomic_load(&pack->cancelled);
}

/* ----------------------------------------------------------------------------------- a piece -- */

/* Waits until all pieces before have their places. */
static int take_place(struct pen_pack *pack, struct piece *piece)
{
	int rc = 0;

	pthread_mutex_lock(&pack->lock);
	while (pack->turn != (size_t)(piece - pack->pieces) && !failed(pack))
		pthread_cond_wait(&pack->changed, &pack->lock);
	if (failed(pack)) {
		rc = -ECANCELED;
	} else {
		piece->place = pack->place;
		pack->place += piece->stored;
		pack->stored[piece->tensor] += piece->stored;
		pack->turn++;
		pthread_cond_broadcast(&pack->changed);
	}
	pthread_mutex_unlock(&pack->lock);
	return rc;
}

static void encode_piece(struct worker *worker, struct piece *piece)
{
	const struct pen_pack *pack = worker->pack;
	enum planes_kind kind = pack->kinds[piece->tensor];
	uint32_t width = planes_shapes[kind].bytes;

	piece->stored = 0;
	for (uint32_t i = 0; i < piece->chunk_count; i++) {
		struct planes_chunk *chunk = &pack->chunks.chunks[piece->chunk + i];

		planes_encode(kind, worker->original + (uint64_t)i * PLANES_CHUNK * width,
			      planes_chunk_values(piece->bytes / width, i),
			      worker->stored + piece->stored, chunk);
		piece->stored += chunk->bytes;
	}
}

static int decode_piece(struct worker *worker, const struct piece *piece, unsigned char *to,
			struct pen_error *err)
{
	const struct pen_pack *pack = worker->pack;
	const struct pen_tensor *tensor = &pack->table->tensors[piece->tensor];
	enum planes_kind kind = pack->kinds[piece->tensor];
	uint32_t width = planes_shapes[kind].bytes;
	uint64_t at = 0;

	for (uint32_t i = 0; i < piece->chunk_count; i++) {
		const struct planes_chunk *chunk = &pack->chunks.chunks[piece->chunk + i];

		if (!planes_decode(kind, worker->stored + at, chunk,
				   planes_chunk_values(piece->bytes / width, i),
				   to + (uint64_t)i * PLANES_CHUNK * width))
			return coded_damaged(pack->file->name, tensor, piece->number + i,
					     piece->place + at, err);
		at += chunk->bytes;
	}
	return 0;
}

static int pack_piece(struct worker *worker, struct piece *piece, struct pen_error *err)
{
	struct pen_pack *pack = worker->pack;
	int rc = read_all(pack->file, worker->original, piece->bytes, piece->original, err);

	if (rc)
		return rc;
	piece->crc32 = crc32_of(worker->original, piece->bytes);
	piece->stored = piece->bytes;
	if (piece->chunk_count)
		encode_piece(worker, piece);
	rc = take_place(pack, piece);
	if (rc)
		return rc;
	return write_all(pack->file->to, piece->chunk_count ? worker->stored : worker->original,
			 piece->stored, piece->place, err);
}

static int unpack_piece(struct worker *worker, struct piece *piece, struct pen_error *err)
{
	struct pen_pack *pack = worker->pack;
	unsigned char *to = piece->chunk_count ? worker->original : worker->stored;
	int rc = read_all(pack->file, worker->stored, piece->stored, piece->place, err);

	if (!rc)
		rc = decode_piece(worker, piece, to, err);
	if (rc)
		return rc;
	piece->crc32 = crc32_of(to, piece->bytes);
	return write_all(pack->file->to, to, piece->bytes, piece->original, err);
}

/* ------------------------------------------------------------------------------- all pieces -- */

static void fail(struct pen_pack *pack, int rc, const struct pen_error *err)
{
	pthread_mutex_lock(&pack->lock);
	/* Who gives up because of an error, or since it was cancelled, has nothing to say. A store
	 * may fail by that name, too. */
	if (!pack->rc && (rc != -ECANCELED || !atomic_load(&pack->cancelled))) {
		pack->rc = rc;
		pack->err = *err;
	}
	pthread_cond_broadcast(&pack->changed);
	pthread_mutex_unlock(&pack->lock);
}

static struct piece *take_piece(struct pen_pack *pack)
{
	struct piece *piece = NULL;

	pthread_mutex_lock(&pack->lock);
	if (!failed(pack) && pack->next < pack->piece_count)
		piece = &pack->pieces[pack->next++];
	pthread_mutex_unlock(&pack->lock);
	return piece;
}

static void *work(void *argument)
{
	struct worker *worker = argument;
	struct pen_pack *pack = worker->pack;
	struct piece *piece;

	while ((piece = take_piece(pack)) != NULL) {
		struct pen_error err;
		int rc = pack->step(worker, piece, &err);

		if (rc) {
			fail(pack, rc, &err);
			break;
		}
		atomic_fetch_add(&pack->done, piece->bytes);
	}
	return NULL;
}

/* All pieces, by as many threads as the system gives, this one among them. */
static int run_pieces(struct pen_pack *pack, step *step_of_each, struct pen_error *err)
{
	unsigned int started = 1;

	pack->step = step_of_each;
	pack->next = pack->turn = 0;
	while (started < pack->worker_count && started < pack->piece_count &&
	       !os_thread_start(&pack->workers[started].thread, work, &pack->workers[started]))
		started++;
	work(&pack->workers[0]);
	for (unsigned int i = 1; i < started; i++)
		pthread_join(pack->workers[i].thread, NULL);
	if (pack->rc && err)
		*err = pack->err;
	if (!pack->rc && atomic_load(&pack->cancelled))
		return error_set(err, -ECANCELED, pack->file->doing, pack->file->name, -1,
				 "it was cancelled");
	return pack->rc;
}

static int by_original(const void *left, const void *right)
{
	const struct piece *a = left, *b = right;

	return a->original < b->original ? -1 : a->original > b->original;
}

/* Sets the CRC32 of the whole original file; puts the pieces into its order. */
static void join_crc32s(struct pen_pack *pack)
{
	uint64_t crc32 = crc32_of(pack->header, pack->header_size);

	qsort(pack->pieces, pack->piece_count, sizeof(pack->pieces[0]), by_original);
	for (size_t i = 0; i < pack->piece_count; i++)
		crc32 = digest_crc32_join(crc32, pack->pieces[i].crc32, pack->pieces[i].bytes);
	pack->crc32 = (uint32_t)crc32;
}

/* ---------------------------------------------------------------------------------- cutting -- */

/* How many pieces so many bytes are. */
static size_t pieces_of(uint64_t bytes)
{
	return (size_t)((bytes + PIECE - 1) / PIECE);
}

/* The pieces of a run of bytes, behind those that are there. */
static void cut(struct pen_pack *pack, const struct piece *whole, uint32_t width)
{
	for (uint64_t at = 0; at < whole->bytes; at += PIECE) {
		struct piece *piece = &pack->pieces[pack->piece_count++];
		uint64_t left = whole->bytes - at;

		*piece = *whole;
		piece->bytes = left < PIECE ? left : PIECE;
		piece->original += at;
		if (width) {
			piece->number = at / ((uint64_t)width * PLANES_CHUNK);
			piece->chunk += piece->number;
			piece->chunk_count = (uint32_t)planes_chunk_count(piece->bytes / width);
		} else {
			piece->place += at;
			piece->stored = piece->bytes;
		}
	}
}

/* Where a file is not coded, it is copied: everything behind the header as it is. */
static void cut_plain(struct pen_pack *pack)
{
	pack->piece_count = 0;
	cut(pack, &(struct piece){
		.original = pack->header_size,
		.place = pack->header_size,
		.bytes = pack->file->size - pack->header_size,
	}, 0);
}

/* Coded tensors first, so that all of them are aligned. Sets where the chunks of each begin. */
static void cut_to_pack(struct pen_pack *pack)
{
	uint64_t chunk = 0;

	for (int coded = 1; coded >= 0; coded--)
		for (size_t i = 0; i < pack->table->count; i++) {
			const struct pen_tensor *tensor = &pack->table->tensors[i];
			uint32_t width = planes_shapes[pack->kinds[i]].bytes;

			if ((width != 0) != coded)
				continue;
			cut(pack, &(struct piece){ .tensor = i, .original = tensor->offset,
						   .bytes = tensor->bytes, .chunk = chunk }, width);
			if (width)
				chunk += planes_chunk_count(tensor->bytes / width);
		}
	pack->chunk_count = chunk;
}

static void cut_to_unpack(struct pen_pack *pack)
{
	for (size_t i = 0; i < pack->table->count; i++) {
		const struct pen_tensor *tensor = &pack->table->tensors[i];
		const struct coded_tensor *known = &pack->file->coded->tensors[i];
		size_t first = pack->piece_count;

		cut(pack, &(struct piece){ .tensor = i, .original = known->original,
					   .place = tensor->offset, .bytes = tensor->bytes,
					   .chunk = known->first },
		    planes_shapes[known->kind].bytes);
		for (; known->kind && first < pack->piece_count; first++) {
			struct piece *piece = &pack->pieces[first];

			piece->place = pack->chunks.offsets[piece->chunk];
			for (uint32_t k = 0; k < piece->chunk_count; k++)
				piece->stored += pack->chunks.chunks[piece->chunk + k].bytes;
		}
	}
}

/* --------------------------------------------------------------------- the header of packed -- */

/* The metadata of the original, and what says that it is coded; NULL: no memory. */
static struct pen_metadata *make_metadata(const struct pen_pack *pack, size_t *count,
					  char bytes[24], char crc32[12])
{
	const struct safetensors *table = pack->table;
	struct pen_metadata *all = os_calloc(table->metadata_count + 4, sizeof(all[0])), *at = all;

	if (!all)
		return NULL;
	*at++ = (struct pen_metadata){ .key = CODED_KEY_VERSION, .value = CODED_VERSION };
	*at++ = (struct pen_metadata){ .key = CODED_KEY_BYTES, .value = bytes };
	*at++ = (struct pen_metadata){ .key = CODED_KEY_CRC32, .value = crc32 };
	*at++ = (struct pen_metadata){ .key = CODED_KEY_HEADER, .value = pack->header + PREFIX,
				       .value_length = pack->header_size - PREFIX };
	for (size_t i = 0; i < table->metadata_count; i++)
		if (strncmp(table->metadata[i].key, CODED_MARK, strlen(CODED_MARK)))
			*at++ = table->metadata[i];
	*count = (size_t)(at - all);
	return all;
}

struct header {
	struct pen_save_tensor *tensors;	/* the table of chunks, then those of the file */
	uint64_t *bytes;			/* that each has in the coded file */
	size_t *order;
	size_t count;
};

static void describe(const struct pen_pack *pack, struct header *header)
{
	header->bytes[0] = pack->chunk_count * sizeof(struct planes_chunk);
	header->tensors[0] = (struct pen_save_tensor){
		.name = CODED_TABLE, .dtype = PEN_U8, .rank = 1, .shape = &header->bytes[0],
	};
	header->order[header->count++] = 0;
	for (int coded = 1; coded >= 0; coded--)
		for (size_t i = 0; i < pack->table->count; i++) {
			const struct pen_tensor *tensor = &pack->table->tensors[i];

			if ((pack->kinds[i] != PLANES_NONE) != coded)
				continue;
			header->bytes[i + 1] = coded ? pack->stored[i] : tensor->bytes;
			header->tensors[i + 1] = (struct pen_save_tensor){
				.name = tensor->name,
				.name_length = tensor->name_length,
				.dtype = coded ? PEN_U8 : tensor->dtype,
				.rank = coded ? 1 : tensor->rank,
				.shape = coded ? &header->bytes[i + 1] : tensor->shape,
			};
			header->order[header->count++] = i + 1;
		}
}

/* The header for the sizes that are known now, filled up to `room`. */
static int make_header(const struct pen_pack *pack, uint64_t room, char **text, size_t *size,
		       struct pen_error *err)
{
	size_t count = pack->table->count + 1;
	struct header header = {
		.tensors = os_calloc(count, sizeof(header.tensors[0])),
		.bytes = os_calloc(count, sizeof(header.bytes[0])),
		.order = os_calloc(count, sizeof(header.order[0])),
	};
	struct safetensors_file file = { .name = pack->file->name, .align = CODED_DATA_ALIGN,
					 .placed = true, .room = room };
	struct pen_metadata *metadata;
	char bytes[24], sum[12];
	int rc;

	snprintf(bytes, sizeof(bytes), "%" PRIu64, pack->file->size);
	snprintf(sum, sizeof(sum), "%08" PRIx32, pack->crc32);
	file.metadata = metadata = make_metadata(pack, &file.metadata_count, bytes, sum);
	if (header.tensors && header.bytes && header.order && metadata) {
		describe(pack, &header);
		file.tensors = header.tensors;
		file.bytes = header.bytes;
		file.order = header.order;
		file.count = header.count;
		rc = safetensors_write(&file, text, size, err);
	} else {
		rc = no_memory(pack, err);
	}
	free(header.tensors);
	free(header.bytes);
	free(header.order);
	free(metadata);
	return rc;
}

/* Room for the header is what it would need if no chunk got smaller. */
static int leave_room(struct pen_pack *pack, struct pen_error *err)
{
	size_t size, count = pack->table->count;
	char *text;
	int rc;

	for (size_t i = 0; i < count; i++)
		if (pack->kinds[i])
			pack->stored[i] = pack->table->tensors[i].bytes + PLANES_ALIGN;
	rc = make_header(pack, 0, &text, &size, err);
	if (rc)
		return rc;
	free(text);
	memset(pack->stored, 0, count * sizeof(pack->stored[0]));
	pack->room = size;
	pack->place = pack->room + pack->chunk_count * sizeof(struct planes_chunk);
	return 0;
}

/* ---------------------------------------------------------------------------- the two ways -- */

static int write_plain(struct pen_pack *pack, struct pen_error *err)
{
	int rc;

	cut_plain(pack);
	rc = write_all(pack->file->to, pack->header, pack->header_size, 0, err);
	if (!rc)
		rc = run_pieces(pack, unpack_piece, err);
	if (rc)
		return rc;
	join_crc32s(pack);
	pack->packed.stored += pack->file->size;
	/* What was tried before may have been longer. */
	rc = os_truncate(pack->file->to->fd, pack->file->size);
	return rc ? error_sys(err, rc, "write", pack->file->to->name, -1) : 0;
}

static int write_front(struct pen_pack *pack, struct pen_error *err)
{
	char *text;
	size_t size;
	int rc = make_header(pack, pack->room, &text, &size, err);

	if (rc)
		return rc;
	rc = write_all(pack->file->to, text, size, 0, err);
	free(text);
	if (!rc)
		rc = write_all(pack->file->to, pack->chunks.chunks,
			       pack->chunk_count * sizeof(struct planes_chunk), pack->room, err);
	return rc;
}

static void add_up(struct pen_pack *pack)
{
	for (size_t i = 0; i < pack->table->count; i++) {
		const struct pen_tensor *tensor = &pack->table->tensors[i];
		struct pen_packed_kind *kind = &pack->packed.kinds[tensor->dtype];

		kind->tensors++;
		kind->bytes += tensor->bytes;
		kind->stored += pack->is_coded && pack->kinds[i] ? pack->stored[i] : tensor->bytes;
	}
}

static int pack_file(struct pen_pack *pack, struct pen_error *err)
{
	bool any = false;
	int rc;

	for (size_t i = 0; i < pack->table->count; i++)
		any |= pack->kinds[i] != PLANES_NONE;
	if (any) {
		cut_to_pack(pack);
		pack->chunks.chunks = os_calloc((size_t)pack->chunk_count,
						sizeof(pack->chunks.chunks[0]));
		rc = pack->chunks.chunks ? leave_room(pack, err) : no_memory(pack, err);
		if (!rc)
			rc = run_pieces(pack, pack_piece, err);
		if (rc)
			return rc;
		pack->is_coded = pack->place < pack->file->size;
	}
	if (pack->is_coded) {
		pack->packed.stored += pack->place;
		join_crc32s(pack);
		rc = write_front(pack, err);
	} else {
		/* What was tried was done, too: nobody shall see bytes become fewer. */
		if (any)
			atomic_fetch_add(&pack->total, pack->file->size - pack->header_size);
		rc = write_plain(pack, err);
	}
	add_up(pack);
	return rc;
}

static int unpack_file(struct pen_pack *pack, struct pen_error *err)
{
	const struct coded *coded = pack->file->coded;
	int rc;

	pack->is_coded = coded != NULL;
	if (!coded)
		return pack->file->to ? write_plain(pack, err) : 0;
	rc = coded_chunks_read(coded, pack->file->source, 0, pack->table->count, &pack->chunks,
			       err);
	if (rc)
		return rc;
	pack->packed.stored += pack->file->size;
	cut_to_unpack(pack);
	rc = write_all(pack->file->to, pack->header, pack->header_size, 0, err);
	if (!rc)
		rc = run_pieces(pack, unpack_piece, err);
	if (rc)
		return rc;
	join_crc32s(pack);
	add_up(pack);
	if (pack->crc32 == coded->crc32)
		return 0;
	words_bad(err, pack->file->name, -1, "what was unpacked is not the file that was packed: "
		  "its CRC32 is %08" PRIx32 " and not %08" PRIx32, pack->crc32, coded->crc32);
	error_hint(err, "The file is damaged: take another copy of it");
	return -EBADMSG;
}

/* What unpacking does to a file that was written, and to a plain one as well. */
static int check_file(struct pen_pack *pack, struct pen_error *err)
{
	int rc;

	if (pack->file->coded)
		return unpack_file(pack, err);
	cut_plain(pack);
	rc = run_pieces(pack, unpack_piece, err);
	join_crc32s(pack);
	return rc;
}

/* ------------------------------------------------------------------------------- one file -- */

/* Bytes of the original file, and of its header with the length before it. */
static uint64_t original_bytes(const struct pack_file *file)
{
	return file->coded ? file->coded->bytes : file->size;
}

static uint64_t original_header(const struct pack_file *file)
{
	return file->coded ? PREFIX + file->coded->header_length : file->table->data;
}

static int take_header(struct pen_pack *pack, struct pen_error *err)
{
	const struct coded *coded = pack->file->coded;

	pack->header_size = original_header(pack->file);
	pack->header = os_calloc(1, (size_t)pack->header_size + 1);
	if (!pack->header)
		return no_memory(pack, err);
	if (!coded)
		return read_all(pack->file, pack->header, pack->header_size, 0, err);
	memcpy(pack->header, &(uint64_t){ coded->header_length }, PREFIX);
	memcpy(pack->header + PREFIX, coded->header, coded->header_length);
	return 0;
}

/* The kind of a tensor in the coded file, be that the one that is read or the one to write. */
static enum planes_kind kind_in_coded(const struct pack_file *file, size_t number)
{
	const struct pen_tensor *tensor = &file->table->tensors[number];
	enum planes_kind kind = coded_kind(tensor->dtype);

	if (file->coded)
		return file->coded->tensors[number].kind;
	return kind && tensor->bytes / planes_shapes[kind].bytes >= CODED_VALUES_LEAST
		? kind : PLANES_NONE;
}

static int make_lists(struct pen_pack *pack, struct pen_error *err)
{
	size_t count = pack->table->count, pieces = pieces_of(pack->file->size) + 1;

	pack->kinds = os_calloc(count + 1, sizeof(pack->kinds[0]));
	pack->stored = os_calloc(count + 1, sizeof(pack->stored[0]));
	for (size_t i = 0; i < count; i++)
		pieces += pieces_of(pack->table->tensors[i].bytes);
	pack->pieces = os_calloc(pieces, sizeof(pack->pieces[0]));
	if (!pack->kinds || !pack->stored || !pack->pieces)
		return no_memory(pack, err);
	for (size_t i = 0; i < count; i++) {
		pack->kinds[i] = kind_in_coded(pack->file, i);
		pack->stored[i] = pack->table->tensors[i].coded;
	}
	return 0;
}

static void drop_lists(struct pen_pack *pack)
{
	coded_chunks_fini(&pack->chunks);
	free(pack->pieces);
	free(pack->kinds);
	free(pack->stored);
	free(pack->header);
}

/* Have one of the ways above gone over a file. */
static int go_over(struct pen_pack *pack, const struct pack_file *file,
		   int (*way)(struct pen_pack *pack, struct pen_error *err), struct pen_error *err)
{
	int rc;

	pack->file = file;
	pack->table = file->table;
	pack->is_coded = false;
	pack->header = NULL;
	pack->piece_count = 0;
	rc = make_lists(pack, err);
	if (!rc)
		rc = take_header(pack, err);
	if (!rc)
		rc = way(pack, err);
	drop_lists(pack);
	return rc;
}

static int read_object(void *source, void *buffer, uint64_t length, uint64_t offset,
		       struct pen_error *err)
{
	return object_read(source, buffer, (size_t)length, offset, err);
}

/* What a file was packed to has the same original. */
static int verify(struct pen_pack *pack, const struct pack_file *file, struct pen_error *err)
{
	struct pack_file written = { .doing = "verify", .name = file->to->name, .read = read_object,
				     .source = file->to };
	struct pen_packed packed = pack->packed;
	uint32_t crc32 = pack->crc32;
	struct safetensors *table;
	struct coded *coded;
	struct stat st;
	int rc = os_fstat(file->to->fd, &st);

	if (rc)
		return error_sys(err, rc, written.doing, written.name, -1);
	written.size = (uint64_t)st.st_size;
	rc = model_read_header(file->to, written.size, &table, &coded, err);
	written.table = table;
	written.coded = coded;
	if (!rc)
		rc = go_over(pack, &written, check_file, err);
	if (coded)
		coded_free(coded);
	else
		free(table);
	pack->file = file;
	pack->packed = packed;
	if (!rc && pack->crc32 != crc32)
		rc = error_set(err, -EIO, written.doing, written.name, -1,
			       "what was written is not what was read: the CRC32 of its original "
			       "is %08" PRIx32 " and not %08" PRIx32, pack->crc32, crc32);
	if (rc != -EBADMSG && rc != -EIO)
		return rc;
	/* Who reads a file is told to get another; this one is being made. */
	err->hint[0] = 0;
	error_hint(err, "Memory or disk are bad: try again");
	return rc;
}

static int run_file(struct pen_pack *pack, const struct pack_file *file, struct pen_error *err)
{
	int rc = go_over(pack, file, pack->direction == PACK ? pack_file : unpack_file, err);

	pack->packed.bytes += original_bytes(file);
	pack->packed.coded |= pack->is_coded;
	if (!rc && file->unchanged)
		rc = file->unchanged(file->source, err);
	if (!rc && pack->direction == PACK && pack->options.verify)
		rc = verify(pack, file, err);
	return rc;
}

static void *run(void *argument)
{
	struct pen_pack *pack = argument;
	struct pen_error err;
	int rc = 0;

	for (size_t i = 0; !rc && i < pack->file_count; i++)
		rc = run_file(pack, &pack->files[i], &err);
	pthread_mutex_lock(&pack->lock);
	pack->rc = rc;
	if (rc)
		pack->err = err;
	pack->packed.seconds = (double)(os_now() - pack->started) * 1e-9;
	atomic_store(&pack->state, !pack->rc ? PEN_DONE
				   : pack->rc == -ECANCELED ? PEN_CANCELLED : PEN_FAILED);
	pthread_cond_broadcast(&pack->changed);
	pthread_mutex_unlock(&pack->lock);
	return NULL;
}

/* ---------------------------------------------------------------------------------- starting -- */

static void pack_free(struct pen_pack *pack)
{
	for (unsigned int i = 0; i < pack->worker_count; i++)
		free(pack->workers[i].original);
	pthread_cond_destroy(&pack->changed);
	pthread_mutex_destroy(&pack->lock);
	pen_model_close(pack->model);
	free(pack->files);
	free(pack);
}

static int make_workers(struct pen_pack *pack, struct pen_error *err)
{
	uint64_t limit = pack->options.memory_limit ? pack->options.memory_limit : MEMORY_LIMIT;
	uint64_t wanted = pack->options.threads ? pack->options.threads : topology_cores();

	if (limit < THREAD_MEMORY) {
		error_set(err, -EINVAL, "keep within", "the memory limit", -1,
			  "packing needs %llu bytes at least", (unsigned long long)THREAD_MEMORY);
		error_hint(err, "Allow 4 MiB or more");
		return -EINVAL;
	}
	if (wanted > limit / THREAD_MEMORY)
		wanted = limit / THREAD_MEMORY;
	if (wanted > THREADS_MAX)
		wanted = THREADS_MAX;
	for (uint64_t i = 0; i < wanted; i++) {
		struct worker *worker = &pack->workers[i];

		worker->pack = pack;
		worker->original = os_calloc(1, THREAD_MEMORY);
		if (!worker->original)
			return error_sys(err, -ENOMEM, pack->files[0].doing,
					 pack->files[0].name, -1);
		worker->stored = worker->original + PIECE + PLANES_ALIGN;
		pack->worker_count++;
	}
	return 0;
}

/* What cannot be packed, or need not be. */
static int check(enum pack_direction direction, const struct pack_file *file,
		 struct pen_error *err)
{
	if (file->to && file->to->fd < 0) {
		error_set(err, -EINVAL, "write to", file->to->name, -1, "it is no file");
		error_hint(err, "Name a file");
		return -EINVAL;
	}
	if (direction == UNPACK)
		return 0;
	if (file->coded) {
		error_set(err, -EINVAL, file->doing, file->name, -1, "it is packed already");
		error_hint(err, "Use it as it is, or unpack it first");
		return -EINVAL;
	}
	for (size_t i = 0; i < file->table->count; i++)
		if (!strcmp(file->table->tensors[i].name, CODED_TABLE)) {
			error_set(err, -EINVAL, file->doing, file->name, -1,
				  "it has a tensor of the name " CODED_TABLE);
			error_hint(err, "Coded files keep this name for themselves: rename it");
			return -EINVAL;
		}
	return 0;
}

static int prepare(struct pen_pack *pack, const struct pack_file *files, size_t count,
		   struct pen_error *err)
{
	uint64_t total = 0;
	int rc = 0;

	pack->files = os_calloc(count + 1, sizeof(files[0]));
	if (!pack->files)
		return error_sys(err, -ENOMEM, files[0].doing, files[0].name, -1);
	for (size_t i = 0; !rc && i < count; i++) {
		pack->files[i] = files[i];
		total += original_bytes(&files[i]) - original_header(&files[i]);
		rc = check(pack->direction, &files[i], err);
	}
	pack->file_count = count;
	if (pack->direction == PACK && pack->options.verify)
		total *= 2;
	atomic_store(&pack->total, total);
	return rc ? rc : make_workers(pack, err);
}

int pack_start(enum pack_direction direction, const struct pack_file *files, size_t count,
	       const struct pen_pack_options *options, struct pen_pack **pack,
	       struct pen_error *err)
{
	struct pen_pack *new = os_calloc(1, sizeof(*new));
	pthread_condattr_t clock;
	int rc;

	*pack = NULL;
	if (!new)
		return error_sys(err, -ENOMEM, files[0].doing, files[0].name, -1);
	new->direction = direction;
	new->generation = os_generation();
	new->started = os_now();
	pthread_mutex_init(&new->lock, NULL);
	pthread_condattr_init(&clock);
	pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
	pthread_cond_init(&new->changed, &clock);
	pthread_condattr_destroy(&clock);
	atomic_store(&new->state, PEN_RUNNING);
	if (options)
		memcpy(&new->options, options, options->size < sizeof(*options)
					       ? options->size : sizeof(*options));
	rc = prepare(new, files, count, err);
	if (!rc) {
		rc = os_thread_start(&new->thread, run, new);
		if (rc)
			error_sys(err, rc, "start a thread for", files[0].name, -1);
	}
	if (rc)
		pack_free(new);
	else
		*pack = new;
	return rc;
}

/* ------------------------------------------------------------------------------------ a file -- */

static int object_is_unchanged(void *source, struct pen_error *err)
{
	return object_unchanged(source, err);
}

static int start(enum pack_direction direction, const char *path, struct pen_object *object,
		 const struct pen_pack_options *options, struct pen_pack **pack,
		 struct pen_error *err)
{
	struct pack_file file = { .doing = direction == PACK ? "pack" : "unpack",
				  .to = object, .read = read_object,
				  .unchanged = object_is_unchanged };
	struct pen_model *model;
	int rc;

	*pack = NULL;
	error_clear(err);
	rc = pen_model_open_files(&path, 1, &model, err);
	if (rc)
		return rc;
	file.name = model->files[0].path;
	file.size = model->files[0].size;
	file.table = model->tables[0];
	file.coded = model->coded[0];
	file.source = model->files[0].object;
	rc = pack_start(direction, &file, 1, options, pack, err);
	if (rc)
		pen_model_close(model);
	else
		(*pack)->model = model;
	return rc;
}

/* ----------------------------------------------------------------------------------- public -- */

int pen_pack_start(const char *path, struct pen_object *object,
		   const struct pen_pack_options *options, struct pen_pack **pack,
		   struct pen_error *err)
{
	*pack = NULL;
	return object ? start(PACK, path, object, options, pack, err)
		      : error_set(err, -EINVAL, "pack", path, -1, "there is no object for it");
}

int pen_unpack_start(const char *path, struct pen_object *object,
		     const struct pen_pack_options *options, struct pen_pack **pack,
		     struct pen_error *err)
{
	return start(UNPACK, path, object, options, pack, err);
}

/* Are we a child of the process that started it? Its threads are not here. */
static bool inherited(const struct pen_pack *pack)
{
	return pack->generation != os_generation();
}

void pen_pack_poll(struct pen_pack *pack, struct pen_progress *progress)
{
	*progress = (struct pen_progress){
		.state = inherited(pack) ? PEN_FAILED : atomic_load(&pack->state),
		.bytes = atomic_load(&pack->done),
		.seconds = (double)(os_now() - pack->started) * 1e-9,
	};
	/* After the bytes, which are never more. */
	progress->total = atomic_load(&pack->total);
}

void pen_pack_cancel(struct pen_pack *pack)
{
	/* No lock, so a signal handler may. Who waits for a turn is woken by the thread whose turn
	 * it is, which looks at this before it takes its place. */
	atomic_store(&pack->cancelled, true);
}

int pen_pack_wait_for(struct pen_pack *pack, double seconds)
{
	struct timespec until = os_from_now(seconds);
	int rc = 0;

	if (inherited(pack))
		return 0;
	pthread_mutex_lock(&pack->lock);
	while (!rc && atomic_load(&pack->state) < PEN_DONE)
		rc = -pthread_cond_timedwait(&pack->changed, &pack->lock, &until);
	pthread_mutex_unlock(&pack->lock);
	return rc;
}

int pen_pack_wait(struct pen_pack *pack, struct pen_packed *packed, struct pen_error *err)
{
	int rc;

	if (inherited(pack)) {
		error_set(err, -ECHILD, "finish", "packing", -1,
			  "it was started before this process was forked");
		error_hint(err, "Wait for it in the process that started it");
		return -ECHILD;
	}
	pthread_join(pack->thread, NULL);
	rc = pack->rc;
	if (err && rc)
		*err = pack->err;
	else
		error_clear(err);
	if (packed) {
		size_t size = packed->size < sizeof(*packed) ? packed->size : sizeof(*packed);

		memcpy(packed, &pack->packed, size);
		packed->size = size;
	}
	pack_free(pack);
	return rc;
}
