/* mpi.h - what cnn.c uses of MPI. lab08.c implements it: each rank is a process that is connected to
   the checker only, which forwards its messages to the right neighbor. */
#pragma once

typedef int MPI_Comm, MPI_Info, MPI_Datatype, MPI_Request;
typedef struct MPI_Status MPI_Status; // which nobody reads
#define MPI_STATUS_IGNORE ((MPI_Status *)0)

#define MPI_STATUS_IGNORE ((MPI_Status *)0)

enum { MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, MPI_INFO_NULL, MPI_BYTE };
enum { MPI_THREAD_SERIALIZED = 2 };

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided);
int MPI_Finalize(void);
int MPI_Abort(MPI_Comm comm, int status);
int MPI_Comm_rank(MPI_Comm comm, int *rank);
int MPI_Comm_size(MPI_Comm comm, int *size);
int MPI_Comm_split_type(MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm *part);
int MPI_Comm_free(MPI_Comm *comm);
int MPI_Isend(const void *data, int bytes, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request *request);
int MPI_Irecv(void *data, int bytes, MPI_Datatype type, int from, int tag, MPI_Comm comm,
              MPI_Request *request);
int MPI_Test(MPI_Request *request, int *done, MPI_Status *status);
