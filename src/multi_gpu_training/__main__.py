from multi_gpu_training.cli import main

if __name__ == "__main__":
    main()
